"""The compose stack's files agree with each other and with the repository, without an engine."""

import importlib
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.cli.arguments import Parser
from coordinator.cli.main import COMMANDS
from coordinator.spec import load_job_spec

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
OVERRIDABLE = re.compile(r"\$\{[A-Z_]+:-(?P<default>[^}]*)\}")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


SERVICES: dict[str, dict[str, Any]] = load(COMPOSE / "docker-compose.yml")["services"]
NODES = [name for name, spec in SERVICES.items() if spec.get("command", [""])[0] == "run"]
SCRAPES = {
    scrape["job_name"]: scrape["static_configs"][0]["targets"]
    for scrape in load(COMPOSE / "prometheus.yml")["scrape_configs"]
}
ONE_SHOT = "token"
"""It has ended before anybody could ask for its health; the others wait for its success."""
each_service = pytest.mark.parametrize("service", SERVICES)
each_node = pytest.mark.parametrize("node", NODES)


def with_defaults(text: str) -> str:
    """What the engine sees when no variable is set."""
    return OVERRIDABLE.sub(lambda match: match["default"], text)


def option(service: str, name: str) -> str:
    """The value of ``--name=value`` in a service's command, or an empty text."""
    options = dict(arg.partition("=")[::2] for arg in SERVICES[service]["command"])
    return str(options.get(f"--{name}", ""))


def binds(service: str) -> dict[str, Path]:
    """Container path -> host path of everything a service mounts from the repository."""
    mounts = [str(volume).split(":") for volume in SERVICES[service].get("volumes", [])]
    return {target: (COMPOSE / source).resolve() for source, target, *_ in mounts if "/" in source}


def on_host(service: str, path: str) -> Path:
    """The repository's file behind a path in a service's container."""
    for target, source in binds(service).items():
        if path == target or path.startswith(f"{target}/"):
            return source / path[len(target) :].lstrip("/")
    raise AssertionError(f"{service} mounts nothing at {path}")


def in_container(service: str, path: str) -> str:
    """A path of a configuration file, which is relative to that file, as the service sees it."""
    folder = option(service, "config.file").rpartition("/")[0]
    return re.sub(r"[^/]+/\.\./", "", f"{folder}/{path}")


def token_of_prometheus() -> str:
    """Where the scrape of the nodes finds its credentials."""
    for scrape in load(COMPOSE / "prometheus.yml")["scrape_configs"]:
        if scrape["job_name"] == "outrider-sidecar":
            return str(scrape["authorization"]["credentials_file"])
    raise AssertionError("Prometheus scrapes no node")


def test_the_stack_is_one_coordinator_four_nodes_and_three_watchers() -> None:
    """The documented door opens on something else than the documentation says."""
    watchers = {"prometheus", "alertmanager", "grafana"}
    assert NODES == ["node-0", "node-1", "node-2", "node-3"]
    assert set(SERVICES) == {ONE_SHOT, "coordinator", *NODES, *watchers}
    assert [node for node in NODES if "--spare" in SERVICES[node]["command"]] == ["node-3"]


@each_service
def test_every_path_mounted_from_the_repository_is_there(service: str) -> None:
    """The engine makes an empty folder in place of a missing file, and the service fails oddly."""
    for source in binds(service).values():
        assert source.exists(), f"{service} mounts {source}"


@each_service
def test_what_is_mounted_from_the_repository_is_read_only(service: str) -> None:
    """A container changes the checkout of the person who tried it."""
    for volume in SERVICES[service].get("volumes", []):
        assert "/" not in volume.split(":")[0] or volume.endswith(":ro")


@each_service
def test_every_image_has_an_exact_default_tag_and_can_be_replaced(service: str) -> None:
    """The stack changes under people's feet, or cannot run where no image can be pulled."""
    image = SERVICES[service]["image"]
    assert OVERRIDABLE.fullmatch(image)
    tag = with_defaults(image).rpartition(":")[2]
    assert tag == "local" or re.fullmatch(r"v?\d+\.\d+\.\d+", tag)


@each_service
def test_every_service_has_a_health_check(service: str) -> None:
    """`up --wait` returns before the stack works."""
    if service != ONE_SHOT:
        assert SERVICES[service]["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("reader", [*NODES, "prometheus"])
def test_whoever_reads_the_token_waits_until_it_is_there(reader: str) -> None:
    """A node refuses to start, or Prometheus scrapes nothing until somebody restarts it."""
    path = option(reader, "token-file") or in_container(reader, token_of_prometheus())
    assert path == option(NODES[0], "token-file")
    assert any(volume.startswith("token:") for volume in SERVICES[reader]["volumes"])
    condition = SERVICES[reader]["depends_on"][ONE_SHOT]["condition"]
    assert condition == "service_completed_successfully"
    assert path in SERVICES[ONE_SHOT]["command"][0]


@each_service
def test_every_service_has_limits(service: str) -> None:
    """A runaway service takes the machine with it."""
    assert set(SERVICES[service]["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert SERVICES[service]["logging"]["options"]["max-size"]


@each_service
def test_no_service_can_gain_privileges(service: str) -> None:
    """A hole in one program becomes a hole in the machine."""
    spec = SERVICES[service]
    assert spec["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in spec["security_opt"]
    assert not {"privileged", "cap_add", "pid", "devices"} & set(spec)
    assert spec.get("network_mode", "none") == "none"


@each_service
def test_ports_are_published_on_loopback_only(service: str) -> None:
    """An unauthenticated coordinator is open to the network of whoever tries the stack."""
    for port in SERVICES[service].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", with_defaults(port))


@each_service
def test_no_secret_is_written_down(service: str) -> None:
    """A password in the repository becomes everybody's password."""
    for name in SERVICES[service].get("environment", {}):
        assert not re.search("PASSWORD|SECRET|TOKEN|_KEY", name)


@pytest.mark.parametrize("service", ["coordinator", *NODES])
def test_every_option_is_one_that_the_command_takes(service: str) -> None:
    """The stack was right for an older command line, and every container ends with an error."""
    name, *options = SERVICES[service]["command"]
    module_name, summary = COMMANDS[name]
    parser = Parser(f"outrider {name}", summary)
    importlib.import_module(module_name).add_arguments(parser)
    asked = parser.parse_args(options)
    assert asked.token_file is None or name == "run"


@each_node
def test_a_node_goes_by_the_name_that_the_network_resolves(node: str) -> None:
    """Workers of another node cannot reach the rendezvous, and training never starts."""
    assert SERVICES[node]["hostname"] == node
    assert option(node, "node-name") == node
    assert option(node, "host") == node


@each_node
def test_a_node_dials_the_coordinator_where_it_listens(node: str) -> None:
    """The sidecars retry for ever."""
    listens = f"http://coordinator:{option('coordinator', 'port')}"
    assert option(node, "coordinator") == listens


@each_node
def test_nodes_write_to_their_checkpoints_together_and_to_nothing_else(node: str) -> None:
    """A rank that moves finds no checkpoint, or two nodes write into one log."""
    written = [volume for volume in SERVICES[node]["volumes"] if not volume.endswith(":ro")]
    others = [volume for other in NODES if other != node for volume in SERVICES[other]["volumes"]]
    assert [volume for volume in written if volume in others] == ["checkpoints:/checkpoints"]


def test_the_job_asks_for_the_nodes_that_the_stack_has() -> None:
    """The job waits for a node that nobody starts."""
    job = load_job_spec(on_host("coordinator", option("coordinator", "job-spec")))
    assert job.nnodes == len(NODES) - 1
    assert not job.remarks()
    for node in NODES:
        assert option(node, "nnodes") == str(job.nnodes)
        assert option(node, "nproc-per-node") == str(job.nproc())


def test_the_node_commands_name_a_script_that_the_image_has() -> None:
    """Every start fails with a missing file."""
    for node in NODES:
        command = SERVICES[node]["command"]
        script = command[command.index("--") + 1]
        assert (ROOT / script).is_file()
        assert script.startswith("examples/")


def test_prometheus_scrapes_the_coordinator_and_every_node() -> None:
    """A dashboard shows a healthy half of the stack."""
    assert SCRAPES["outrider-coordinator"] == [f"coordinator:{option('coordinator', 'port')}"]
    assert SCRAPES["outrider-sidecar"] == [f"{node}:{option(node, 'http-port')}" for node in NODES]


def test_alerts_and_dashboards_ask_for_scrape_jobs_that_exist() -> None:
    """An alert on a job name that nobody scrapes never fires, or always does."""
    files = [ROOT / "alerts/outrider.rules.yaml", *(ROOT / "dashboards").glob("*.json")]
    asked = {
        job
        for file in files
        for job in re.findall(r'\bjob=\\?"([^"\\]+)', file.read_text(encoding="utf-8"))
    }
    assert asked
    assert asked <= set(SCRAPES)


def test_promtool_accepts_the_configuration_laid_out_as_in_the_container(tmp_path: Path) -> None:
    """Prometheus refuses to start, or starts without its rules."""
    shutil.copytree(ROOT / "alerts", tmp_path / "alerts")
    (tmp_path / "compose").mkdir()
    config = shutil.copy(COMPOSE / "prometheus.yml", tmp_path / "compose")
    token = tmp_path / "compose" / token_of_prometheus()
    token.resolve().parent.mkdir()
    token.write_text("made for this test", encoding="utf-8")
    run = subprocess.run(
        ["promtool", "check", "config", config],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "rule files found" in run.stdout


def test_prometheus_finds_its_rules_in_the_container_as_in_the_repository() -> None:
    """The check above passes on the host and the container runs without a single alert."""
    assert on_host("prometheus", option("prometheus", "config.file")) == COMPOSE / "prometheus.yml"
    for rule_file in load(COMPOSE / "prometheus.yml")["rule_files"]:
        inside = in_container("prometheus", rule_file)
        assert on_host("prometheus", inside) == (COMPOSE / rule_file).resolve()


def test_alertmanager_reads_the_repository_s_routes() -> None:
    """The stack routes alerts by rules that nobody reviewed."""
    config = on_host("alertmanager", option("alertmanager", "config.file"))
    assert config == ROOT / "alerts/alertmanager.yaml"


def test_grafana_opens_on_the_overview() -> None:
    """A person on call sees Grafana's welcome page in the middle of the night."""
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    dashboard = json.loads(on_host("grafana", home).read_text(encoding="utf-8"))
    assert dashboard["uid"] == "outrider-overview"


def test_grafana_is_given_the_dashboards_and_data_sources_of_this_stack() -> None:
    """Grafana starts empty, or asks a Prometheus that is not there."""
    provisioning = SERVICES["grafana"]["environment"]["GF_PATHS_PROVISIONING"]
    folder = on_host("grafana", provisioning)
    for file in (folder / "datasources").glob("*.yaml"):
        for source in load(file)["datasources"]:
            host = re.fullmatch(r"http://([a-z]+):\d+", source["url"])
            assert host is not None
            assert host[1] in SERVICES
    providers = load(folder / "dashboards/outrider.yaml")["providers"]
    assert [on_host("grafana", item["options"]["path"]) for item in providers] == [
        ROOT / "dashboards"
    ]


def test_every_file_the_image_copies_is_let_into_the_build() -> None:
    """The build fails on a file that lies in plain sight."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    for line in (COMPOSE / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if line.startswith("COPY ") and "--from=" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert any(name == source or name.startswith(f"{source}/") for name in let_in)


def test_the_image_runs_as_nobody_in_particular() -> None:
    """Whoever breaks out of a worker is root."""
    dockerfile = (COMPOSE / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^USER (\S+)$", dockerfile, re.MULTILINE) == ["10001:10001"]
    assert with_defaults(SERVICES["coordinator"]["build"]["args"]["PYTHON_IMAGE"]) in dockerfile


def test_everything_the_image_installs_is_pinned() -> None:
    """Two builds of one commit differ."""
    tool = runpy.run_path(str(COMPOSE / "tools/image_requirements.py"))
    wanted = {
        re.split("[<>=]", name)[0].lower().replace("_", "-")
        for name in tool["image_requirements"](ROOT / "pyproject.toml")
    }
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pinned = {
        name.lower().replace("_", "-") for name in re.findall(r"^(\S+)==", lock, re.MULTILINE)
    }
    assert "torch" in wanted
    assert wanted <= pinned


@pytest.mark.parametrize("script", sorted(path.name for path in (COMPOSE / "tools").glob("*.sh")))
def test_the_shell_can_read_every_tool(script: str) -> None:
    """A tool for machines without a registry breaks where nobody can look anything up."""
    read = subprocess.run(
        ["sh", "-n", COMPOSE / "tools" / script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (read.returncode, read.stderr) == (0, "")
