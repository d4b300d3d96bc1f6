"""A real Prometheus that holds the hour, and the dashboards' questions to it."""

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.history.story import BEGIN_S, JOB, SCRAPE_S, Story

DEADLINE_S: Final = 120.0
MACROS: Final = {"$__rate_interval": "2m", "$__range": "1h", "$__interval": "30s"}
CHOSEN: Final = {
    "cluster": ".*",
    "training_job": JOB,
    "node": ".+",
    "gpu": ".+",
    "incident": "llama-0001",
    "coordinator": "http://127.0.0.1:8081",
}


@dataclass(frozen=True)
class Past:
    """A Prometheus that holds the hour."""

    url: str

    def get(self, path: str, **query: str) -> Any:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {json.load(error).get('error')}") from error

    def at(self, minute: float, expr: str, **chosen: str) -> list[dict[str, Any]]:
        """Return the instant vector of a dashboard's query, as of a minute of the hour."""
        result = self.instant(expr, minute, **chosen)
        return [{**it["metric"], "value": float(it["value"][1])} for it in result]

    def instant(self, expr: str, minute: float, **chosen: str) -> list[dict[str, Any]]:
        """Return the same as Prometheus puts it."""
        moment = BEGIN_S + minute * 60
        found = self.get("query", query=filled(expr, chosen), time=str(moment))["result"]
        return list(found)

    def over(self, expr: str, begin: float = 0, end: float = 60, **chosen: str) -> list[Any]:
        """Return the series of a dashboard's query between two minutes."""
        return self.get(
            "query_range",
            query=filled(expr, chosen),
            start=str(BEGIN_S + begin * 60),
            end=str(BEGIN_S + end * 60),
            step=str(SCRAPE_S),
        )["result"]


def filled(expr: str, chosen: dict[str, str]) -> str:
    """Return a query as Grafana would send it."""
    for macro, value in MACROS.items():
        expr = expr.replace(macro, value)
    for name, value in {**CHOSEN, **chosen}.items():
        expr = re.sub(rf"\${name}\b|\$\{{{name}\}}", lambda _, value=value: value, expr)
    assert "$" not in expr, expr
    return expr


@contextmanager
def served(folder: Path) -> Iterator[Past]:
    """Tell the hour, import it, and serve it for as long as it is asked."""
    Story().tell().write(folder / "hour.om")
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics",
         str(folder / "hour.om"), str(folder / "tsdb")],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    (folder / "prometheus.yml").write_text("global: {}\n", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with (folder / "log").open("w") as log:
        # An imported series has no end; a short look-back keeps what has gone from looking alive.
        server = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yml'}",
             f"--storage.tsdb.path={folder / 'tsdb'}", "--storage.tsdb.retention.time=100y",
             f"--web.listen-address=127.0.0.1:{port}",
             f"--query.lookback-delta={SCRAPE_S // 3}s"],
            stdout=log, stderr=log,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, folder / "log")
        yield Past(url)
    finally:
        server.terminate()
        server.wait(timeout=60)


def wait_for(url: str, log: Path) -> None:
    due = time.monotonic() + DEADLINE_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except OSError:
            assert time.monotonic() < due, log.read_text()[-2000:]
            time.sleep(0.1)
