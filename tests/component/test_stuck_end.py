"""Ctrl-C and SIGTERM end a daemon although a thread or the loop itself hangs."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.component

DAEMON = """
import asyncio, os, sys, time, types
from coordinator.cli import main, process

process.STOP_WITHIN_S, process.GONE_WITHIN_S = 0.3, 1.0
silent, _ = os.pipe()

async def stuck_thread(stop):
    reading = asyncio.create_task(asyncio.to_thread(os.read, silent, 1))
    await asyncio.sleep(0.1)
    print("ready", flush=True)
    await stop.wait()
    return 0

async def awaited_thread(stop):
    print("ready", flush=True)
    await asyncio.to_thread(os.read, silent, 1)

async def deaf_task(stop):
    print("ready", flush=True)
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def stuck_loop(stop):
    print("ready", flush=True)
    await stop.wait()
    os.read(silent, 1)

command = types.ModuleType("command")
command.add_arguments = lambda parser: None
command.run = lambda args: process.run_until_signal(HOW, sigterm=143)
sys.modules["command"] = command
main.COMMANDS = {"daemon": ("command", "a daemon")}
sys.argv[1:] = ["daemon"]
main.entry()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", ["stuck_thread", "awaited_thread", "deaf_task", "stuck_loop"])
def test_a_daemon_ends_whatever_hangs_in_it(how, number):
    """Somebody who presses Ctrl-C in vain reaches for kill -9, and then nothing is cleaned up."""
    code = DAEMON.replace("HOW", how)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert "Traceback" not in said
