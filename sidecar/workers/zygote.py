"""A process that has imported what the job imports, and forks into workers on request.

Run as ``python -m sidecar.workers.zygote FD MODULE...``; ``FD`` is its end of a socket pair.  It
answers one ready line, then one request after another.  A worker is forked twice, so that it
becomes a child of the nearest subreaper, the sidecar, which can then wait for it like for any
other.  Forking is only safe while there is one thread and no CUDA context; where an import breaks
that, this process says so and ends, and workers start cold.

Standard library only, and of the sidecar nothing but this file: all of it is inherited.
"""

import array
import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import random
import runpy
import signal
import socket
import struct
import sys
import time
import types
from typing import Any, Final, NoReturn

PR_SET_PDEATHSIG: Final = 1
PR_SET_PTRACER: Final = 0x59616D61
LENGTH: Final = struct.Struct(">I")
OUTPUTS: Final = 2
"""File descriptors that come with a request: standard output and standard error."""


def main(argv: list[str]) -> int:
    """Import, serve, and in a forked worker run the script."""
    channel = socket.socket(fileno=int(argv[0]))
    sidecar = os.getppid()
    refusal = _prepare(argv[1:])
    _send(channel, {"ready": refusal is None, "reason": refusal or "", "rss_kib": _rss_kib()})
    if refusal is not None:
        return 1
    request = _serve(channel, sidecar)
    if request is None:
        return 0
    channel.close()
    _become(request)
    _run(request["argv"])
    return 0


def _prepare(modules: list[str]) -> str | None:
    """Import ``modules``; return why forking would not be safe, or None."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a module may raise anything when imported
            return f"importing {name} failed: {type(error).__name__}: {error}"
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only the count matters
    if threads > 1:
        return f"the imports started {threads - 1} threads, which a fork would lose"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the imports initialised CUDA, which does not survive a fork"
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page it looks at
    return None


def _serve(channel: socket.socket, sidecar: int) -> dict[str, Any] | None:
    """Fork a worker for each request.  Returns the request in the worker, None at the end."""
    while True:
        received = _receive(channel)
        if received is None:
            return None
        request, outputs = received
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(told)
            _fork_worker(tell)
            os.close(tell)
            _leave_family(sidecar)
            for target, fd in enumerate(outputs, start=1):
                os.dup2(fd, target)
                os.close(fd)
            return request
        os.close(tell)
        os.waitpid(between, 0)  # from here on the worker is the sidecar's child
        answer = os.read(told, 64).decode()
        _send(channel, {"pid": int(answer)} if answer else {"error": "no process can be made"})
        for fd in (told, *outputs):
            os.close(fd)


def _fork_worker(tell: int) -> None:
    """Fork once more, tell the zygote who the worker is, and end in between."""
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        os.write(tell, str(pid).encode())
        os._exit(0)


def _leave_family(sidecar: int) -> None:
    """Lead a session of our own, and die with the sidecar, whose child we become."""
    os.setsid()
    while os.getppid() != sidecar:
        if os.getppid() == 1:
            os._exit(127)  # the sidecar is gone
        time.sleep(0.0005)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    prctl(PR_SET_PTRACER, sidecar, 0, 0, 0)  # lets the sidecar's py-spy read our stacks
    if os.getppid() != sidecar:
        os._exit(127)


def _become(request: dict[str, Any]) -> None:
    """Take the worker's environment and folder, and what each process has of its own."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _run(argv: list[str]) -> None:
    """Run ``[script, ...]`` or ``[-m, module, ...]`` as ``python`` would."""
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path[0] = os.getcwd()  # noqa: PTH109 - a string is what belongs there
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))  # noqa: PTH100, PTH120
            _run_script(argv[0])
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - shown as the interpreter would, without us
        _fail(error)


def _run_script(path: str) -> None:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __loader__=loader, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    with open(path, "rb") as file:  # noqa: PTH123 - as the interpreter does
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)  # noqa: S102 - running the user's script is the purpose


def _fail(error: BaseException) -> NoReturn:
    """Print the traceback from the script's own first frame on, and end with status 1."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    raise SystemExit(1)


# --- the wire -------------------------------------------------------------------------------


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    space = socket.CMSG_SPACE(OUTPUTS * array.array("i").itemsize)
    head, ancillary, _, _ = channel.recvmsg(LENGTH.size, space)
    if not head:
        return None
    outputs = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            outputs.frombytes(data[: len(data) - len(data) % outputs.itemsize])
    body = bytearray()
    (length,) = LENGTH.unpack(head)
    while len(body) < length:
        chunk = channel.recv(length - len(body))
        if not chunk:
            return None
        body += chunk
    return json.loads(body), list(outputs)


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(body)) + body)


def _rss_kib() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - no pathlib needed here
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
