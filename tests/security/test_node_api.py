"""Attacks on a real node's HTTP API, over real sockets."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coordinator.cli.main import main
from sidecar.config import ConfigError, NodeConfig, check_node_config
from sidecar.daemon import run_sidecar
from sidecar.tls import client_context
from tests.component.test_api_server import config_of, serving
from tests.security.test_doors import asked, bearer

pytestmark = pytest.mark.component
DEADLINE_S = 60.0


@contextlib.asynccontextmanager
async def guarded(config: NodeConfig, scheme: str) -> AsyncIterator[str]:
    """Run a whole sidecar until the end of the block."""
    stop = asyncio.Event()
    running = asyncio.create_task(run_sidecar(config, stop))
    url = f"{scheme}://127.0.0.1:{config.http_port}"
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await listening(config.http_port):  # noqa: ASYNC110 - nobody tells us
                await asyncio.sleep(0.05)
            yield url
    finally:
        stop.set()
        await running


async def listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_no_node_serves_strangers_without_asking_for_anything(tmp_path: Path, host: str) -> None:
    """Anybody on the network could stop its workers."""
    with pytest.raises(ConfigError, match="give tls or a tokenFile"):
        check_node_config(config_of(tmp_path, "", http_host=host))


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}],
)
def test_a_web_page_stops_no_worker(tmp_path: Path, headers: dict[str, str]) -> None:
    """The API takes any content type, so that a plain form on any page could post to it."""

    async def scene() -> None:
        config = config_of(tmp_path, "import time; time.sleep(1000)")
        async with serving(config) as (_, running):
            url = f"http://127.0.0.1:{config.http_port}"
            for path in ("/stop", "/shutdown", "/start", "/update"):
                simple = {**headers, "Content-Type": "text/plain"}
                assert await asked(url, "POST", path, headers=simple, data="{}") == 403
            assert await asked(url, "GET", "/status", headers=headers) == 403
            assert not running.done()
            assert await asked(url, "GET", "/status") == 200

    asyncio.run(scene())


def test_with_certificates_a_node_obeys_operators_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A taken node, or a dashboard, could shut every other node down."""
    certs = tmp_path / "certs"
    assert main(["certs", "init", str(certs)]) == 0
    config = config_of(
        tmp_path, "pass", tls=str(certs / "sidecar"), coordinator="https://127.0.0.1:1"
    )
    check_node_config(config)

    async def scene() -> None:
        async with guarded(config, "https") as url:
            with pytest.raises(aiohttp.ClientError):
                await asked(url.replace("https", "http"), "GET", "/status")
            for role, read, order in (
                ("viewer", 200, 403),
                ("sidecar", 200, 403),
                ("coordinator", 403, 403),
                ("operator", 200, 422),
            ):
                context = client_context(certs / role)
                assert await asked(url, "GET", "/status", context) == read, role
                assert await asked(url, "POST", "/start", context, json={}) == order, role

    with caplog.at_level(logging.INFO, "outrider.audit"):
        asyncio.run(scene())
    orders = [item.getMessage() for item in caplog.records if item.name == "outrider.audit"]
    assert len(orders) == 1
    assert "certificate operator" in orders[0]


def test_tls_is_not_given_up_in_silence(tmp_path: Path) -> None:
    """A node with certificates that dials plain HTTP sends everything in clear text."""
    certs = tmp_path / "certs"
    assert main(["certs", "init", str(certs)]) == 0
    with pytest.raises(ConfigError, match="write https://"):
        check_node_config(config_of(tmp_path, "", tls=str(certs / "sidecar")))
    with pytest.raises(ConfigError, match="tls: "):
        check_node_config(config_of(tmp_path, "", tls=str(tmp_path / "nowhere")))


def test_a_nodes_address_for_scrapes_takes_no_order(tmp_path: Path) -> None:
    """Whoever may read numbers could stop the workers."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    port = config_of(tmp_path, "").http_port
    changes: dict[str, Any] = {"token_file": str(token), "metrics_listen": f"127.0.0.1:{port}"}
    config = config_of(tmp_path, "pass", **changes)
    check_node_config(config)

    async def scene() -> None:
        async with guarded(config, "http") as url:
            scrapes = f"http://127.0.0.1:{port}"
            while not await listening(port):  # noqa: ASYNC110 - nobody tells us
                await asyncio.sleep(0.05)
            assert await asked(scrapes, "GET", "/metrics") == 200
            for path in ("/stop", "/shutdown", "/start"):
                assert await asked(scrapes, "POST", path, headers=bearer("secret")) == 404
            assert await asked(scrapes, "GET", "/status", headers=bearer("secret")) == 404
            assert await asked(url, "GET", "/metrics") == 401

    asyncio.run(scene())
