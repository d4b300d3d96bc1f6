import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from coordinator.cli import run
from coordinator.cli.arguments import Parser
from coordinator.cli.main import COMMANDS, main

QUESTIONS = (
    ["status"],
    ["incidents"],
    ["explain"],
    ["wait"],
    ["restart", "--why", "x"],
    ["stop", "--why", "x"],
    ["exclude", "a", "--why", "x"],
)


def complaint(capsys: pytest.CaptureFixture[str], argv: list[str], status: int) -> str:
    """Return the one line that a refused command wrote."""
    assert main(argv) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("outrider: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("argv", QUESTIONS)
def test_an_unreachable_coordinator_is_one_line_and_status_3(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    """A script must tell "the job failed" from "nobody could be asked"."""
    with socket.socket() as held:  # bound and not listening: nobody answers there
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        text = complaint(capsys, [*argv, "--coordinator", url], 3)
    assert url in text
    assert "Connection refused" in text


@pytest.mark.parametrize(
    "url",
    [
        *(
            "localhost:8081",
            "ftp://a",
            "http://",
            "http://[::1",
            "",
            "http://a:b",
            "http://a:99999",
        ),
        *("http://a/\u00e9", "http://\udcff/", f"http://{'h' * 300}", f"http://{'h' * 64}.x"),
        *(
            "http://a b",
            "http://a\n",
            "http://a\x1b[2J",
            "http://u:p@a",
            "http://a/?q",
            "http://a#f",
        ),
        *("http://..", "http://a..b"),
    ],
)
@pytest.mark.parametrize("argv", [*QUESTIONS, ["run", "-m", "json"]])
def test_an_address_that_is_no_url_is_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], url: str
) -> None:
    """The commonest slip is to leave the scheme out; none of them may end in a traceback."""
    text = complaint(capsys, [argv[0], "--coordinator", url, *argv[1:]], 2)
    assert "is not a URL" in text
    assert text[:-1].isprintable()


@pytest.mark.parametrize("argv", [["explain", "\udcff"], ["exclude", "\udcff", "--why", "x"]])
def test_a_name_that_is_not_utf8_is_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    """A terminal of another encoding sends such bytes."""
    assert "is not UTF-8" in complaint(capsys, argv, 2)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["launch"], "invalid choice: 'launch'"),
        (["status", "--jsn"], "--jsn"),
        (["incidents", "--limit", "0"], "'0' is not a number from 1 on"),
        (["incidents", "--limit", "\u0664"], "is not a number"),
        (["wait", "--timeout", "soon"], "'soon' is not a number of seconds"),
        (["wait", "--timeout", "nan"], "'nan' is not a number of seconds"),
        (["wait", "--timeout", "-1"], "--timeout"),
        (["restart"], "--why"),
        (["exclude", "--why", "x"], "NODE"),
        (["coordinator"], "which job?"),
        (["coordinator", "--job", "x"], "which job?"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    """A screenful of usage hides the word that was wrong."""
    assert words in complaint(capsys, argv, 2)


SCRIPT = "train.py"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no training script given"),
        (["--standalone"], "no training script given"),
        (["--standalone", "--"], "no training script given"),
        (["--standalone", "absent.py"], "absent.py"),
        (["--standalone", "-m", "absent_module_of_nobody"], "absent_module_of_nobody"),
        (["--standalone", "-m", "json.nope"], "module 'json.nope' is not importable"),
        (["--standalone", "-m", "json.tool.nope"], "module 'json.tool.nope' is not importable"),
        (["--standalone", "-m", "json"], "or is a package without __main__"),
        (["--standalone", "-m", "train.py"], "module 'train.py' is not importable"),
        (["--standalone", "-m", "a/b"], "'a/b' is not a module's name"),
        (["--standalone", "-m", ""], "no training script given"),
        (["--standalone", "/dev/zero"], "is a device or a pipe, not a file"),
        (["--standalone", ""], "no training script given"),
        (["--standalone", "a\0b"], "holds a zero byte"),
        (["--standalone", "--log-dir", "/dev/null/x", SCRIPT], "--log-dir: "),
        (["--standalone", "--run-dir", "/dev/null/x", SCRIPT], "--run-dir: "),
        (["--standalone", "--log-dir", "x" * 300, SCRIPT], "--log-dir: "),
        (["--standalone", "--label", "rack=\udcff", SCRIPT], "--label: "),
        (["--standalone", "--label", "a=\x1b[2J", SCRIPT], "--label: "),
        (["--standalone", "--label", f"a={'x' * 300}", SCRIPT], "--label: "),
        (["--host", "\udcff", SCRIPT], "--host: '\\udcff' is not a host's name"),
        (["--host", "h" * 300, SCRIPT], "--host: "),
        (["--host", "", SCRIPT], "--host: "),
        (["--node-name", "\udcff", SCRIPT], "--node-name: "),
        (["--node-name", "n" * 64, SCRIPT], "--node-name: "),
        (["--standalone", "--job", "a/b", SCRIPT], "name"),
        (["--standalone", "--job-spec", "/dev/zero", SCRIPT], "it is a device, not a file"),
        (["--standalone", "--token-file", "/dev/zero", SCRIPT], "it is a device, not a file"),
        (["--standalone", "--nnodes", "9" * 5000, SCRIPT], "is neither N nor N:MAX"),
        (["--nproc-per-node", "9" * 5000, SCRIPT], "is not a number of workers"),
        (["--standalone", "--no-python", "absent-program-of-nobody"], "is not on PATH"),
        (["--standalone", "-m", "--no-python", "x"], "exclude each other"),
        (["--standalone", "--nnodes", "2", SCRIPT], "--standalone is one node, not 2"),
        (["--standalone", "--run-dir", "/tmp/" + "x" * 110, SCRIPT], "--run-dir: "),
        (["--standalone", "--job-spec", "absent.yaml", SCRIPT], "absent.yaml"),
        (["--standalone", "--token-file", "absent", SCRIPT], "--token-file"),
        (["--node-name", "a/b", SCRIPT], "--node-name: 'a/b' is not a name"),
        (["--coordinator", "localhost:1", SCRIPT], "--coordinator: 'localhost:1' is not a URL"),
        (["--http-host", "0.0.0.0", SCRIPT], "--http-host: 0.0.0.0 can be reached"),
        (["--label", "rack", SCRIPT], "'rack' is not KEY=VALUE"),
        (["--gpu", "0", SCRIPT], "'0' is not INDEX=PCI"),
        (["--gpu", "0=nonsense", SCRIPT], "--gpu: "),
        (["--nproc-per-node", "0", SCRIPT], "'0' is not a number of workers from 1"),
        (["--kernel-log", "/", SCRIPT], "--kernel-log: / is a directory"),
        (["--bogus", SCRIPT], "--bogus"),
    ],
)
def test_a_run_that_cannot_work_is_one_line_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    argv: list[str],
    words: str,
) -> None:
    """An error after minutes of waiting for nodes costs a whole cluster's time."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / SCRIPT).write_text("")
    assert words in complaint(capsys, ["run", *argv], 2)
    assert [path.name for path in tmp_path.iterdir()] == [SCRIPT]


def test_c67_a_temporary_folder_too_deep_for_a_socket_is_one_line_with_the_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pods have such folders, and "AF_UNIX path too long" in a traceback helps nobody."""
    deep = tmp_path / "pods" / ("0" * 36) / "volumes" / ("v" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.chdir(tmp_path)
    (tmp_path / SCRIPT).write_text("")
    text = complaint(capsys, ["run", "--standalone", SCRIPT], 2)
    assert "the system allows 107; choose a shorter runDir (--run-dir)" in text
    assert list(deep.iterdir()) == []


def test_the_command_after_the_script_is_the_scripts_own() -> None:
    """An option swallowed from the script's command line trains with another learning rate."""
    for argv in (
        ["--nnodes", "2", "--nproc_per_node=3", "t.py", "--lr", "1", "--nnodes", "9", "-m"],
        ["--nnodes", "2", "--nproc_per_node=3", "--", "t.py", "--lr", "1", "--nnodes", "9", "-m"],
    ):
        parser = Parser("outrider run", "")
        run.add_arguments(parser)
        args = parser.parse_args(argv)
        assert (args.script, args.nnodes, args.nproc_per_node) == ("t.py", "2", 3)
        assert args.arguments == ["--lr", "1", "--nnodes", "9", "-m"]
        assert not args.module


def test_torchruns_other_options_are_taken_and_named() -> None:
    """Whoever replaces the word torchrun in a script must not be sent to edit the rest."""
    parser = Parser("outrider run", "")
    run.add_arguments(parser)
    argv = ["--rdzv_backend=c10d", "--rdzv-endpoint", "h:1", "--max-restarts", "3", "t.py"]
    args = parser.parse_args(argv)
    assert args.script == "t.py"
    assert args.not_needed == ["--rdzv_backend", "--rdzv-endpoint", "--max-restarts"]


@pytest.mark.parametrize("place", ["a file", "below a file", "a link"])
@pytest.mark.parametrize("argv", [["certs", "init", "--host", "a"], ["demo", "--keep"]])
def test_a_folder_that_cannot_be_made_is_one_line_with_the_way_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], place: str
) -> None:
    """The system's own words tell what failed, and neither which option nor what to do."""
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("mine")
    link.symlink_to(tmp_path / "nowhere" / "at all" if argv[0] == "demo" else file)
    folder = {"a file": file, "below a file": file / "below", "a link": link}[place]
    text = complaint(capsys, [*argv, str(folder)], 2)
    assert str(folder) in text
    assert "name a " in text
    assert file.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [file, link]


@pytest.mark.parametrize("content", [None, "", "two words", "g\u00fcltig", b"\xff\xfe"])
def test_a_token_file_that_holds_no_token_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | bytes | None
) -> None:
    """An empty token would open the door to everybody who sends an empty one."""
    token = tmp_path / "token"
    if content is not None:
        token.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = complaint(capsys, ["status", "--token-file", str(token)], 2)
    assert str(token) in text


def test_an_answer_that_is_no_coordinators_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Another service on the port must not be taken for an empty job."""
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().split("port ")[1].split()[0]
        url = f"http://127.0.0.1:{port}"
        assert "no coordinator does" in complaint(capsys, ["status", "--coordinator", url], 3)
    finally:
        server.kill()
        server.communicate()


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    """Help that takes seconds is not asked for again."""
    code = (
        "import sys; from coordinator.cli.main import main; status = main(['--help']);"
        "heavy = {'aiohttp', 'rich', 'torch', 'msgspec', 'prometheus_client', 'uvloop', 'yaml'};"
        "sys.exit(status or ', '.join(heavy & set(sys.modules)) or 0)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    for name in COMMANDS:
        assert f"\n  {name} " in shown.stdout


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A bug report begins with it."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("outrider ")
