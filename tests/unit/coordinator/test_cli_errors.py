import socket
import subprocess
import sys
from pathlib import Path

import pytest

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
    "url", ["localhost:8081", "ftp://a", "http://", "http://[::1", "", "http://a:b"]
)
def test_an_address_that_is_no_url_is_refused(capsys: pytest.CaptureFixture[str], url: str) -> None:
    """The commonest slip is to leave the scheme out."""
    assert "is no URL" in complaint(capsys, ["status", "--coordinator", url], 2)


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
