import asyncio
import json
import re
import shutil
import threading
from asyncio.subprocess import PIPE
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from coordinator.admission import Admission
from coordinator.audit_trail import AuditTrail
from coordinator.command_times import CommandTimes
from coordinator.events import Event, HealthTold, OperatorAsked
from coordinator.guard import guard
from coordinator.history import History
from coordinator.incidents import (
    Culprit,
    Decision,
    Finding,
    Incident,
    IncidentPhase,
    Outcome,
)
from coordinator.journal import Journal
from coordinator.journal_format import DurableState
from coordinator.ledger import Ledger, Seen, report
from coordinator.metrics import Exposition, JobNumbers
from coordinator.operator_api import ENDPOINTS, OperatorApi
from coordinator.phases import JobPhase
from coordinator.view import JobView, NodeStatus
from sidecar.api import AgentState, CheckpointPointer, FaultKind, RankStatus
from sidecar.roles import Tokens
from worker_shim.messages import RestartMode

pytestmark = pytest.mark.component

DEADLINE_S = 30.0

VIEW = JobView(
    job="job",
    phase=JobPhase.RUNNING,
    phase_age_s=3.5,
    generation=2,
    topology_version=1,
    nnodes=1,
    nproc_per_node=1,
    world=("a",),
    step=40,
    complete_checkpoints=(CheckpointPointer(prefix="model", step=30, path="/ckpt/30"),),
    chosen_checkpoints=(),
    nodes=(
        NodeStatus(
            node="a",
            connected=True,
            spare=False,
            state=AgentState.RUNNING,
            generation=2,
            topology_version=1,
            group_rank=0,
            last_heard_age_s=0.2,
            excluded=None,
            reason="",
            host="127.0.0.1",
            http_port=1234,
            ranks=(RankStatus(rank=0, local_rank=0, pid=77, step=40),),
        ),
    ),
    excluded={},
    open_incident=None,
    restarts_total=1,
    restart_budget_remaining=9,
    outcome_reason="",
    waiting_for="",
)


LEDGER = Ledger.begin(0)
LEDGER.look(30 * 10**9, Seen(phase=JobPhase.STARTING, ranks=2))
LEDGER.look(40 * 10**9, Seen(phase=JobPhase.STARTING, ranks=2))


def incident(number: str) -> Incident:
    """Return a recovered crash of rank 0."""
    return (
        Incident(
            id=f"job-{number}",
            job="job",
            generation=1,
            topology_version=1,
            trigger="crash",
            outcome=Outcome.RECOVERED,
            finding=Finding(
                outcome="attributed",
                basis="direct",
                why="it exited",
                culprit=Culprit(
                    kind=FaultKind.CRASH,
                    node="a",
                    rank=0,
                    local_rank=0,
                    gpu=None,
                    reason="killed by SIGKILL",
                ),
            ),
            decision=Decision(mode=RestartMode.PROCESS, reason="first crash"),
            steps_lost=2,
        )
        .reached(IncidentPhase.FAULT, int(number) * 10**9)
        .reached(IncidentPhase.FIRST_STEP, (int(number) + 3) * 10**9)
    )


class Desk:
    """A served API and a client at it."""

    def __init__(self, url: str, inbox: "asyncio.Queue[Event]", journal: Journal) -> None:
        self.url = url
        self.inbox = inbox
        self.journal = journal
        self.view = VIEW
        self.history = History()
        self.session = aiohttp.ClientSession()

    async def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, **body: Any
    ) -> tuple[int, Any]:
        """Return status and JSON of one request."""
        async with self.session.request(
            method, self.url + path, json=body or None, headers=headers
        ) as answer:
            return answer.status, json.loads(await answer.read())


@asynccontextmanager
async def opened(state_dir: Path, token: str | None) -> AsyncIterator[Desk]:
    """Serve the API on a free port over a real journal."""
    journal = Journal.open(state_dir / "journal")
    inbox: asyncio.Queue[Event] = asyncio.Queue()

    def numbers() -> JobNumbers:
        return JobNumbers(
            now_s=1000.0,
            view=desk.view,
            history=desk.history,
            ledger=LEDGER,
            commands=CommandTimes(),
        )

    trail = AuditTrail(journal, "job")
    api = OperatorApi(
        view=lambda: desk.view,
        inbox=inbox,
        journal=journal,
        exposition=Exposition(numbers),
        ledger=lambda: report("job", LEDGER),
        trail=trail,
    )
    admission = Admission(tokens=None if token is None else Tokens.parse(token))
    app = web.Application(middlewares=[guard(admission, trail)])
    app.add_routes(api.routes())
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    desk = Desk(f"http://127.0.0.1:{runner.addresses[0][1]}", inbox, journal)
    try:
        yield desk
    finally:
        await desk.session.close()
        await runner.cleanup()
        await journal.close()


def visit(
    state_dir: Path,
    scene: Callable[[Desk], Awaitable[None]],
    token: str | None = None,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Run one scene with a generous deadline."""

    async def main() -> None:
        async with asyncio.timeout(deadline_s), opened(state_dir, token) as desk:
            await scene(desk)

    asyncio.run(main())


def test_the_job_and_its_nodes_are_shown(tmp_path: Path) -> None:
    """Who is on call sees a stale or partial picture and acts on it."""

    async def scene(desk: Desk) -> None:
        status, job = await desk.ask("GET", "/v1/job")
        assert status == 200
        assert (job["phase"], job["generation"], job["step"]) == ("running", 2, 40)
        assert job["complete_checkpoints"][0]["step"] == 30
        assert "nodes" not in job
        status, body = await desk.ask("GET", "/v1/nodes")
        assert status == 200
        assert [node["node"] for node in body["nodes"]] == ["a"]
        assert body["nodes"][0]["ranks"][0]["pid"] == 77
        status, body = await desk.ask("GET", "/healthz")
        assert (status, body) == (200, {"status": "ok", "job": "job", "phase": "running"})

    visit(tmp_path, scene)


def test_incidents_are_listed_and_found_by_prefix_or_last(tmp_path: Path) -> None:
    """The wrong incident explained at night is worse than none."""

    async def scene(desk: Desk) -> None:
        assert await desk.ask("GET", "/v1/incidents") == (200, {"incidents": []})
        status, _ = await desk.ask("GET", "/v1/incidents/last")
        assert status == 404
        for number in ("1", "2", "10"):
            await desk.journal.commit(DurableState(job="job"), incident(number))
        _, body = await desk.ask("GET", "/v1/incidents")
        assert [line["id"] for line in body["incidents"]] == ["job-1", "job-2", "job-10"]
        line = body["incidents"][0]
        assert (line["node"], line["rank"], line["recovery_s"]) == ("a", 0, 3.0)
        assert (line["kind"], line["mode"]) == ("crash", "process_level_restart")
        _, body = await desk.ask("GET", "/v1/incidents?limit=1")
        assert [line["id"] for line in body["incidents"]] == ["job-10"]
        for wanted, found in (("last", "job-10"), ("job-2", "job-2"), ("job-1", "job-1")):
            status, body = await desk.ask("GET", f"/v1/incidents/{wanted}")
            assert (status, body["id"]) == (200, found)
        status, body = await desk.ask("GET", "/v1/incidents/last?format=yaml")
        assert (status, body) == (400, {"error": "format must be json or markdown"})
        async with desk.session.get(desk.url + "/v1/incidents/last?format=markdown") as answer:
            assert (answer.status, answer.content_type) == (200, "text/markdown")
            assert (await answer.text()).startswith("# Incident job-10 of job job")
        status, body = await desk.ask("GET", "/v1/incidents/job-")
        assert status == 409
        assert "fits 3 incidents" in body["error"]
        for limit in ("0", "-1", "x", "\u0664", "99999999"):
            status, body = await desk.ask("GET", f"/v1/incidents?limit={limit}")
            assert status == 400
            assert "limit must be" in body["error"]

    visit(tmp_path, scene)


def test_the_ledger_is_served_and_adds_up(tmp_path: Path) -> None:
    """Whoever pays for the machines is told a share of an unknown whole."""

    async def scene(desk: Desk) -> None:
        status, found = await desk.ask("GET", "/v1/ledger")
        assert status == 200
        assert found["accounts_s"]["waiting_for_node"] == 30.0
        assert found["accounts_s"]["starting"] == 10.0
        assert sum(found["accounts_s"].values()) + found["held_s"] == found["wall_s"] == 40.0
        assert found["lost_gpu_hours"] == {"start": pytest.approx(80 / 3600)}
        assert (found["goodput"], found["ettr"]) == (0.0, 0.0)

    visit(tmp_path, scene)


def test_a_scrape_is_written_down_in_another_thread(tmp_path: Path) -> None:
    """Ten thousand nodes written down where the core runs hold up a recovery."""

    async def scene(desk: Desk) -> None:
        threads: set[int] = set()

        class Spy(dict[str, str]):
            def items(self) -> Any:
                threads.add(threading.get_ident())
                return super().items()

        desk.view = replace(VIEW, excluded=Spy(b="gpu lost"))
        async with desk.session.get(desk.url + "/metrics") as answer:
            assert 'node="b"' in await answer.text()
        assert threads
        assert threading.get_ident() not in threads

    visit(tmp_path, scene)


def test_exemplars_lead_from_a_slow_recovery_to_its_incident(tmp_path: Path) -> None:
    """A point on a heatmap that leads nowhere is looked up by guessing times."""

    async def scene(desk: Desk) -> None:
        desk.history.note(incident("1"))
        headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
        async with desk.session.get(desk.url + "/metrics", headers=headers) as answer:
            assert answer.content_type == "application/openmetrics-text"
            page = await answer.text()
        assert page.endswith("# EOF\n")
        found = [line for line in page.splitlines() if ' # {incident="job-1"} ' in line]
        assert any(
            line.startswith("outrider_recovery_duration_seconds_bucket")
            and 'mode="process_level_restart"' in line
            and ' # {incident="job-1"} 3.0 4.0' in line
            for line in found
        )
        async with desk.session.get(desk.url + "/metrics") as answer:
            assert "# {incident" not in await answer.text()

    visit(tmp_path, scene)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/job/restart", OperatorAsked(action="restart", who="ana", why="new driver")),
        ("/v1/job/stop", OperatorAsked(action="stop", who="ana", why="new driver")),
        (
            "/v1/nodes/a/exclude",
            OperatorAsked(action="exclude", who="ana", why="new driver", node="a"),
        ),
    ],
)
def test_an_operators_request_reaches_the_core_with_who_and_why(
    tmp_path: Path, path: str, expected: OperatorAsked
) -> None:
    """An unexplained restart is looked for as a fault."""

    async def scene(desk: Desk) -> None:
        status, body = await desk.ask("POST", path, who="ana", why="new driver")
        assert (status, body) == (202, {"accepted": True, "action": expected.action})
        assert desk.inbox.get_nowait() == expected

    visit(tmp_path, scene)


def test_only_a_node_that_is_excluded_and_fit_can_be_included(tmp_path: Path) -> None:
    """A 202 for a wish that cannot come true sends a person to bed too early."""

    def with_node(**changes: str | None) -> JobView:
        return replace(VIEW, nodes=(replace(VIEW.nodes[0], **changes),))

    async def scene(desk: Desk) -> None:
        status, body = await desk.ask("POST", "/v1/nodes/a/include", who="ana", why="mended")
        assert (status, body) == (409, {"error": "node 'a' is not excluded"})
        desk.view = with_node(excluded="XID 79", unfit="its sidecar says XID 79")
        status, body = await desk.ask("POST", "/v1/nodes/a/include", who="ana", why="mended")
        assert (status, body) == (
            409,
            {"error": "node 'a' stays excluded: its sidecar says XID 79"},
        )
        status, body = await desk.ask("POST", "/v1/nodes/zz/include", who="ana", why="mended")
        assert status == 404
        assert desk.inbox.empty()
        desk.view = with_node(excluded="XID 79")
        status, body = await desk.ask("POST", "/v1/nodes/a/include", who="ana", why="mended")
        assert (status, body) == (202, {"accepted": True, "action": "include"})
        expected = OperatorAsked(action="include", who="ana", why="mended", node="a")
        assert desk.inbox.get_nowait() == expected

    visit(tmp_path, scene)


def test_a_bad_request_is_refused_with_the_field_and_reaches_nobody(tmp_path: Path) -> None:
    """A typo must not restart a job of a thousand GPUs."""

    async def scene(desk: Desk) -> None:
        status, body = await desk.ask("POST", "/v1/job/restart", who="ana")
        assert status == 422
        assert "why" in body["error"]
        status, body = await desk.ask("POST", "/v1/job/restart", who="", why="x")
        assert status == 422
        assert "who: must be a text of length >= 1, but is the text ''" in body["error"]
        status, body = await desk.ask("POST", "/v1/job/restart", who="ana", why="x" * 501)
        assert status == 422
        status, body = await desk.ask("POST", "/v1/nodes/zz/exclude", who="ana", why="x")
        assert status == 404
        assert "no node 'zz'" in body["error"]
        async with desk.session.post(
            desk.url + "/v1/job/stop", data=b"{", headers={"Content-Type": "application/json"}
        ) as answer:
            assert answer.status == 400
        async with desk.session.post(
            desk.url + "/v1/job/stop", data=b'{"who":"a","why":"b"}'
        ) as answer:
            assert answer.status == 415
        desk.view = replace(VIEW, phase=JobPhase.COMPLETED)
        status, body = await desk.ask("POST", "/v1/job/stop", who="ana", why="x")
        assert (status, body) == (409, {"error": "the job has already completed"})
        assert desk.inbox.empty()

    visit(tmp_path, scene)


def test_what_another_agent_knows_of_a_node_reaches_the_core(tmp_path: Path) -> None:
    """A node that its provider takes away would be found out by its silence."""

    async def scene(desk: Desk) -> None:
        path = "/v1/health-events"
        said = {"source": "provider", "severity": "fatal", "reason": "will be retired"}
        status, body = await desk.ask("POST", path, node="127.0.0.1", **said)
        assert (status, body) == (
            202,
            {"accepted": True, "node": "a", "known": True, "severity": "fatal"},
        )
        told = desk.inbox.get_nowait()
        assert isinstance(told, HealthTold)
        (notice,) = told.word.notices
        assert (notice.node, notice.words) == ("a", "provider says: will be retired")
        labels = {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}
        status, body = await desk.ask("POST", path, node="zz", source="agent", labels=labels)
        assert (status, body["known"], body["severity"]) == (202, False, "healthy")
        assert desk.inbox.get_nowait()
        for bad, words in (
            (
                {"severity": "awful", "reason": "x"},
                "severity: must be one of fatal, warning, healthy, but is the text 'awful'",
            ),
            ({"severity": "fatal"}, "reason is missing"),
            (
                {"severity": "fatal", "reason": "x", "until": "tomorrow"},
                "until: must be a date and time",
            ),
            ({"severity": "fatal", "reason": "x", "until": "2020-01-01T00:00:00Z"}, "in the past"),
        ):
            status, body = await desk.ask("POST", path, node="a", source="s", **bad)
            assert status == 422
            assert words in body["error"]
        assert desk.inbox.empty()

    visit(tmp_path, scene)


def test_unknown_paths_and_methods_are_answered_in_json(tmp_path: Path) -> None:
    """A program that gets HTML for an error reports a parse error instead of the error."""

    async def scene(desk: Desk) -> None:
        status, body = await desk.ask("GET", "/v1/jobs")
        assert status == 404
        assert "/v1/job" in body["error"]
        status, body = await desk.ask("GET", "/v1/job/restart")
        assert status == 405
        assert body["error"] == "/v1/job/restart takes POST"

    visit(tmp_path, scene)


def test_without_the_token_nothing_but_health_is_answered(tmp_path: Path) -> None:
    """Whoever reaches the port could stop the job."""

    async def scene(desk: Desk) -> None:
        for endpoint in ENDPOINTS:
            path = endpoint.path.format(incident="last", node="a")
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}):
                status, body = await desk.ask(endpoint.method, path, headers=headers)
                assert status == (200 if endpoint.path == "/healthz" else 401), endpoint
                assert status == 200 or "token" in body["error"]
        headers = {"Authorization": "Bearer secret"}
        assert (await desk.ask("GET", "/v1/job", headers=headers))[0] == 200

    visit(tmp_path, scene, token="secret")


def test_a_browser_may_look_with_the_token_as_password_and_change_nothing(
    tmp_path: Path,
) -> None:
    """A page of another site could stop the job with the password that the browser remembers."""

    async def scene(desk: Desk) -> None:
        await desk.journal.commit(DurableState(job="job"), incident("1"))
        async with desk.session.get(desk.url + "/incidents/last") as answer:
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"].startswith("Basic ")
        for password, status in (("secret", 200), ("wrong", 401), ("", 401)):
            basic = {"Authorization": "Basic " + b64encode(f"me:{password}".encode()).decode()}
            for path in ("/incidents/last", "/incidents", "/v1/job"):
                async with desk.session.get(desk.url + path, headers=basic) as answer:
                    assert answer.status == status
        basic = {"Authorization": "Basic " + b64encode(b"me:secret").decode()}
        status, _ = await desk.ask("POST", "/v1/job/stop", headers=basic, who="a", why="b")
        assert status == 401
        for odd in ("Basic", "Basic !!", "Basic w7w=", "basic "):
            headers = {"Authorization": odd}
            async with desk.session.get(desk.url + "/incidents", headers=headers) as answer:
                assert answer.status == 401
        assert desk.inbox.empty()

    visit(tmp_path, scene, token="secret")


def test_an_incident_s_page_is_served_with_what_keeps_it_harmless(tmp_path: Path) -> None:
    """The last line of defence is the browser, if somebody tells it."""

    async def scene(desk: Desk) -> None:
        async with desk.session.get(desk.url + "/incidents") as answer:
            assert "Nothing has stopped the job so far." in await answer.text()
        status, body = await desk.ask("GET", "/incidents/last")
        assert status == 404
        for number in ("1", "2"):
            await desk.journal.commit(DurableState(job="job"), incident(number))
        async with desk.session.get(desk.url + "/incidents/last") as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert "Incident job-2" in await answer.text()
        async with desk.session.get(desk.url + "/incidents") as answer:
            text = await answer.text()
            assert text.index("/incidents/job-2") < text.index("/incidents/job-1")
        status, body = await desk.ask("GET", "/incidents/job-")
        assert (status, "fits 2 incidents" in body["error"]) == (409, True)

    visit(tmp_path, scene)


def test_the_openapi_document_describes_exactly_what_is_served(tmp_path: Path) -> None:
    """A client generated from a wrong description fails at the worst moment."""

    async def scene(desk: Desk) -> None:
        await desk.journal.commit(DurableState(job="job"), incident("1"))
        _, document = await desk.ask("GET", "/v1/openapi.json")
        assert document["openapi"].startswith("3.1")
        described = {
            (method.upper(), path) for path, row in document["paths"].items() for method in row
        }
        assert described == {(item.method, item.path) for item in ENDPOINTS}
        schemas = document["components"]["schemas"]
        references = re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(document))
        assert set(references) <= set(schemas)
        for path, name in (
            ("/v1/job", "JobView"),
            ("/v1/nodes", "NodeList"),
            ("/v1/incidents", "IncidentList"),
            ("/v1/incidents/last", "Incident"),
            ("/healthz", "Health"),
            ("/v1/ledger", "LedgerReport"),
        ):
            _, body = await desk.ask("GET", path)
            assert set(body) == set(schemas[name]["properties"])
        _, body = await desk.ask("GET", "/v1/nodes")
        assert set(body["nodes"][0]) == set(schemas["NodeStatus"]["properties"])

    visit(tmp_path, scene)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_scrape_page_is_clean_for_promtool(tmp_path: Path) -> None:
    """A page that Prometheus half understands alerts on half of the faults."""

    async def scene(desk: Desk) -> None:
        await desk.journal.commit(DurableState(job="job"), incident("1"))
        desk.history.note(incident("2"))
        desk.view = replace(VIEW, open_incident=incident("1"), excluded={"b": "gpu lost"})
        async with desk.session.get(desk.url + "/metrics") as answer:
            assert answer.content_type == "text/plain"
            page = await answer.read()
        check = await asyncio.create_subprocess_exec(
            "promtool", "check", "metrics", stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        assert (await check.communicate(page), check.returncode) == ((b"", b""), 0)

    visit(tmp_path, scene)


def test_headers_and_paths_of_any_bytes_are_answered_with_a_sentence(tmp_path: Path) -> None:
    """A scanner's request that ends in a traceback hides the one that matters in the log."""

    async def scene(desk: Desk) -> None:
        host, port = desk.url.removeprefix("http://").split(":")
        for line, header, wanted in (
            (b"GET /v1/job", b"Authorization: Bearer \xff\xfe", 401),
            (b"GET /metrics", b"Accept: \xff\xfe;q=\xff", 401),
            (b"GET /v1/incidents/%ff%00", b"Authorization: Bearer secret", 404),
            (b"GET /%ff%fe", b"Authorization: Bearer secret", 404),
            (b"GET /v1/incidents?limit=%ff", b"Authorization: Bearer secret", 400),
            (b"GET /v1/incidents/last?format=%ff", b"Authorization: Bearer secret", 400),
            (b"GET /v1/incidents?limit=1" + b"0" * 5000, b"Authorization: Bearer secret", 400),
            (b"DELETE /v1/job", b"Authorization: Bearer secret", 405),
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(line + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" + header)
            writer.write(b"\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert int(head.split()[1]) == wanted, (line, head)
            sentence = json.loads(body)["error"]
            assert sentence.isprintable()
            assert sentence

    visit(tmp_path, scene, token="secret")


def test_an_accept_header_that_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """A scraper with an odd header must not be answered with a traceback."""

    async def scene(desk: Desk) -> None:
        host, port = desk.url.removeprefix("http://").split(":")
        openmetrics = "application/openmetrics-text;version="
        for accept, wanted in (
            ("\udcff", 200),
            ("text/plain;q=x", 200),
            (f"{openmetrics}1.0.0", 200),
            (f"{openmetrics}\udcff", 406),
            (f"{openmetrics}newest", 406),
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            header = f"Accept: {accept}".encode(errors="surrogateescape")
            writer.write(
                b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" + header
            )
            writer.write(b"\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert int(head.split()[1]) == wanted, (accept, head)
            if wanted != 200:
                assert "Accept" in json.loads(body)["error"]

    visit(tmp_path, scene)
