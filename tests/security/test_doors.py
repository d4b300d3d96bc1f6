"""Every test here is an attack on a door of a real coordinator or node, over real sockets."""

import asyncio
import json
import ssl
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.cli.main import main
from coordinator.daemon import CoordinatorConfig, run_coordinator
from coordinator.kept_journal import kept_orders
from coordinator.listening import CoordinatorError, Door
from coordinator.spec import JobSpec
from coordinator.spec_errors import convert
from sidecar.access import Access
from sidecar.api import UPLINK_PATH, Hello
from sidecar.codec import encode
from sidecar.roles import Tokens
from sidecar.tls import TlsError, client_context
from sidecar.uplink import Uplink

pytestmark = pytest.mark.component
DEADLINE_S = 60.0
ROLE_TOKENS = "viewer v-word\noperator o-word\nsidecar s-word\n"
ORDER = {"who": "mallory", "why": "for fun"}


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    assert main(["certs", "init", str(folder)]) == 0
    assert main(["certs", "issue", str(folder), "sidecar", "node-3"]) == 0
    return folder


def hello_of(node: str) -> Hello:
    return Hello(
        protocol=1,
        agent_version="0",
        job="job",
        node=node,
        incarnation=f"{node}-1",
        host="127.0.0.1",
        http_port=1,
        nproc_per_node=1,
        spare=False,
        labels={},
        gpus=(),
    )


@asynccontextmanager
async def served(
    state_dir: Path, *, limit_s: float | None = DEADLINE_S, linger_s: float = 0, **door: Any
) -> AsyncIterator[str]:
    """Run a whole coordinator and give its URL; an order to stop ends it after ``linger_s``."""
    spec = convert(
        {"name": "job", "replicaSpecs": [{"name": "nodes", "replicas": 1}]}, JobSpec, "test"
    )
    config = CoordinatorConfig(
        settings=spec.settings(1), state_dir=state_dir, door=Door(port=0, **door), linger_s=linger_s
    )
    stop, urls = asyncio.Event(), asyncio.Queue[str]()
    running = asyncio.create_task(run_coordinator(config, stop, listening=urls.put_nowait))
    try:
        async with asyncio.timeout(limit_s):
            listening = asyncio.create_task(urls.get())
            await asyncio.wait({listening, running}, return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():  # it ended instead, and its error says why
                listening.cancel()
                await running
            yield await listening
    finally:
        stop.set()
        await running


async def asked(
    url: str, method: str, path: str, context: ssl.SSLContext | None = None, **options: Any
) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url + path, ssl=context or True, **options) as answer,
    ):
        await answer.read()
        return answer.status


def bearer(word: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {word}"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "node-7.example"])
def test_nobody_serves_strangers_without_asking_for_anything(tmp_path: Path, host: str) -> None:
    """Anybody on the network could stop the job."""

    async def scene() -> None:
        with pytest.raises(CoordinatorError, match="no token is asked for"):
            async with served(tmp_path, host=host):
                pass

    asyncio.run(scene())
    assert not (tmp_path / "coordinator.url").exists()


def test_a_stranger_without_a_certificate_gets_no_byte_of_an_answer(
    tmp_path: Path, certs: Path
) -> None:
    """Who can speak TLS at all could read and stop the job."""

    async def scene() -> None:
        async with served(tmp_path, certificates=certs / "coordinator") as url:
            trusting = ssl.create_default_context(cafile=str(certs / "ca" / "ca.pem"))
            with pytest.raises(aiohttp.ClientError):
                await asked(url, "GET", "/v1/job", trusting)
            with pytest.raises(aiohttp.ClientError):
                await asked(url.replace("https", "http"), "GET", "/v1/job")
            good = client_context(certs / "viewer")
            assert await asked(url, "GET", "/v1/job", good) == 200

    asyncio.run(scene())


def test_a_certificate_of_another_authority_opens_nothing(tmp_path: Path, certs: Path) -> None:
    """Anybody can make an authority and call themselves operator."""
    other = tmp_path / "other"
    assert main(["certs", "init", str(other)]) == 0
    forged = client_context(other / "operator")
    forged.load_verify_locations(certs / "ca" / "ca.pem")

    async def scene() -> None:
        async with served(tmp_path / "state", certificates=certs / "coordinator") as url:
            with pytest.raises(aiohttp.ClientError):
                await asked(url, "POST", "/v1/job/stop", forged, json=ORDER)
            # and a false coordinator hears nothing of us
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await asked(url, "GET", "/v1/job", client_context(other / "operator"))

    asyncio.run(scene())
    assert kept_orders(tmp_path / "state") == ()


def test_a_sidecar_cannot_pose_as_the_coordinator(tmp_path: Path, certs: Path) -> None:
    """A taken node that answers in the coordinator's place would collect every token."""

    async def scene() -> None:
        async with served(tmp_path, certificates=certs / "sidecar-node-3") as url:
            with pytest.raises(aiohttp.ClientError):  # it is certified for no address
                await asked(url, "GET", "/v1/job", client_context(certs / "viewer"))

    asyncio.run(scene())


@pytest.mark.parametrize("way", ["certificate", "token"])
def test_a_role_opens_its_own_doors_only(tmp_path: Path, certs: Path, way: str) -> None:
    """A dashboard's password, or a taken node, would be enough to stop the job."""
    words = {"viewer": "v-word", "operator": "o-word", "sidecar": "s-word"}
    locks = {
        "certificate": {"certificates": certs / "coordinator"},
        "token": {"tokens": Tokens.parse(ROLE_TOKENS)},
    }

    async def status(url: str, role: str, method: str, path: str, **options: Any) -> int:
        if way == "certificate":
            context = client_context(certs / role)
            return await asked(url, method, path, context, **options)
        return await asked(url, method, path, headers=bearer(words[role]), **options)

    async def scene() -> None:
        async with served(tmp_path, **locks[way]) as url:
            for role in words:
                assert await status(url, role, "GET", "/v1/job") == 200
            for role, wanted in (("viewer", 403), ("sidecar", 403), ("operator", 202)):
                assert await status(url, role, "POST", "/v1/job/restart", json=ORDER) == wanted
            assert await status(url, "viewer", "POST", "/v1/health-events", json={}) == 403
            for role, wanted in (("viewer", 403), ("operator", 403), ("sidecar", 400)):
                assert await status(url, role, "GET", UPLINK_PATH) == wanted  # no WebSocket
            assert await asked_without(url) == 401

    async def asked_without(url: str) -> int:
        if way == "token":
            return await asked(url, "GET", "/v1/audit")
        return 401  # refused in the handshake: see the tests above

    asyncio.run(scene())
    orders = kept_orders(tmp_path)
    assert [order.accepted for order in orders] == [False, False, True]
    assert {order.order for order in orders} == {"restart"}
    assert {order.proof for order in orders} == {way}
    assert (orders[2].who, orders[2].why) == ("mallory", "for fun")


def test_a_node_cannot_speak_for_another_with_its_certificate(tmp_path: Path, certs: Path) -> None:
    """One taken node could report every other one dead."""

    async def said_to(url: str, node: str) -> dict[str, Any]:
        context = client_context(certs / "sidecar-node-3")
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(url + UPLINK_PATH, ssl=context) as socket,
        ):
            await socket.send_bytes(encode(hello_of(node)))
            return json.loads(await socket.receive_str())

    async def scene() -> None:
        async with served(tmp_path, certificates=certs / "coordinator") as url:
            assert (await said_to(url, "node-3"))["type"] == "welcome"
            refused = await said_to(url, "node-4")
            assert refused["type"] == "goodbye"
            assert "node-3" in refused["reason"]

    asyncio.run(scene())


def test_a_sidecar_reaches_its_coordinator_through_tls(tmp_path: Path, certs: Path) -> None:
    """What is only configured, and never used, protects nothing."""

    class Heard:
        def __init__(self) -> None:
            self.events: asyncio.Queue[Any] = asyncio.Queue()

        def put(self, event: Any) -> None:
            self.events.put_nowait(event)

        def dismissed(self, reason: str) -> None:
            self.events.put_nowait(reason)

    async def scene() -> None:
        async with served(tmp_path, certificates=certs / "coordinator") as url:
            heard = Heard()
            access = Access(None, certs / "sidecar")
            task = asyncio.create_task(Uplink(url, hello_of("n0"), heard, access).run())
            first = await heard.events.get()
            assert type(first).__name__ == "UplinkOpened"
            task.cancel()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Origin": "https://evil.example"}, "another site's page"),
        ({"Origin": "null"}, "a page in a sandbox"),
        ({"Host": "evil.example:8081"}, "a name pointed at this machine (DNS rebinding)"),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, "an image that orders"),
    ],
)
def test_a_web_page_orders_nothing_on_an_open_loopback(
    tmp_path: Path, headers: dict[str, str], why: str
) -> None:
    """Whoever looks at a page while their job trains would have it stopped, or read out."""

    async def scene() -> None:
        async with served(tmp_path) as url:
            assert await asked(url, "POST", "/v1/job/stop", json=ORDER, headers=headers) == 403, why
            assert await asked(url, "GET", UPLINK_PATH, headers=headers) == 403
            assert await asked(url, "GET", "/v1/job", headers=headers) == 403
            assert await asked(url, "GET", "/v1/job") == 200

    asyncio.run(scene())
    assert kept_orders(tmp_path) == ()


def test_a_password_that_a_browser_remembers_speaks_for_no_node(tmp_path: Path) -> None:
    """A page could open the browser's own WebSocket to the coordinator and join as a node."""
    remembered = f"Basic {b64encode(b'anybody:o-word').decode()}"

    async def scene() -> None:
        async with served(tmp_path, tokens=Tokens.parse("o-word")) as url:
            shown = {"Authorization": remembered}
            assert await asked(url, "GET", "/incidents", headers=shown) == 200
            assert await asked(url, "GET", UPLINK_PATH, headers=shown) == 401

    asyncio.run(scene())


def test_the_address_for_scrapes_tells_numbers_and_takes_no_order(tmp_path: Path) -> None:
    """Prometheus' network would be able to stop the job, or Prometheus would need a token."""
    import socket  # noqa: PLC0415

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def scene() -> None:
        lock = Tokens.parse("secret")
        async with served(tmp_path, tokens=lock, scrapes=("127.0.0.1", port)) as url:
            scrapes = f"http://127.0.0.1:{port}"
            assert await asked(scrapes, "GET", "/metrics") == 200
            for method, path in (
                ("GET", "/v1/job"),
                ("GET", "/v1/audit"),
                ("GET", UPLINK_PATH),
                ("POST", "/v1/job/stop"),
            ):
                assert await asked(scrapes, method, path, headers=bearer("secret")) == 404
            assert await asked(url, "GET", "/metrics") == 401

    asyncio.run(scene())


def test_guessing_tokens_fills_no_log_and_no_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever may do nothing could still fill the disk."""

    async def scene() -> None:
        async with served(tmp_path, tokens=Tokens.parse("secret")) as url:
            for guess in range(200):
                tried = bearer(f"guess{guess}")
                assert await asked(url, "POST", "/v1/job/stop", json=ORDER, headers=tried) == 401

    asyncio.run(scene())
    assert kept_orders(tmp_path) == ()
    said = [record for record in caplog.records if record.name == "outrider.audit"]
    assert 1 <= len(said) < 50


def test_a_key_that_everybody_can_read_is_refused(tmp_path: Path) -> None:
    """Every user of the machine could be its operator."""
    assert main(["certs", "init", str(tmp_path)]) == 0
    key = tmp_path / "operator" / "key.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "ca").stat().st_mode & 0o777 == 0o700
    key.chmod(0o644)
    with pytest.raises(TlsError, match="chmod 600"):
        client_context(tmp_path / "operator")
    done = subprocess.run(
        [sys.executable, "-m", "coordinator.cli", "status", "--tls", str(tmp_path / "operator")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "chmod 600" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_authority_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A second `init` by mistake would lock the whole fleet out."""
    assert main(["certs", "init", str(tmp_path)]) == 0
    before = (tmp_path / "ca" / "ca-key.pem").read_bytes()
    assert main(["certs", "init", str(tmp_path)]) != 0
    assert (tmp_path / "ca" / "ca-key.pem").read_bytes() == before
    assert "locked out" in capsys.readouterr().err
