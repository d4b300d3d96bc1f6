"""Files that a person names: what is read, and what is refused before it is read without end."""

import os
import socket
import threading
from pathlib import Path

import pytest

from sidecar import given_files
from sidecar.given_files import (
    GivenFileError,
    endless_kind,
    open_given,
    read_given,
    read_given_text,
)


def refused(path: Path, bytes_max: int = 10) -> str:
    with pytest.raises(GivenFileError) as caught:
        read_given(path, bytes_max)
    return str(caught.value)


def test_a_file_is_read_whole_and_one_byte_too_many_is_refused(tmp_path):
    """A limit that is off by one refuses a good file, or reads a bad one."""
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_given(path, 10) == b"0123456789"
    assert refused(path, 9) == "it is larger than 9 bytes"
    path.write_bytes(b"")
    assert read_given(path, 9) == b""


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/full", "/dev/null"])
def test_a_device_is_refused_unread(device):
    """/dev/zero fills the memory of the machine that reads it to its end."""
    assert refused(Path(device)) == "it is a device, not a file"
    assert endless_kind(Path(device)) == "it is a device, not a file"


def test_what_is_no_file_says_what_it_is(tmp_path):
    """A path that was completed one level too early is the commonest slip."""
    assert refused(tmp_path) == "it is a directory"
    assert endless_kind(tmp_path) == "it is a directory"
    assert refused(tmp_path / "none") == "No such file or directory"
    assert endless_kind(tmp_path / "none") is None
    assert "null" in refused(tmp_path / "a\0b")
    assert endless_kind(tmp_path / "a\0b") is None
    assert refused(tmp_path / ("x" * 300)) == "File name too long"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        assert refused(tmp_path / "socket") == "No such device or address"
    (tmp_path / "round").symlink_to("round")
    assert refused(tmp_path / "round") == "Too many levels of symbolic links"


def test_a_pipe_is_read_to_its_writers_end(tmp_path):
    """A job spec out of a template comes through <(...), slowly and in parts."""
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write():
        with path.open("wb", buffering=0) as pipe:
            pipe.write(b"01234")
            pipe.write(b"56789")

    writer = threading.Thread(target=write)
    writer.start()
    assert read_given(path, 10) == b"0123456789"
    writer.join()


def test_a_pipe_without_end_is_refused(tmp_path):
    """`yes | outrider ... /dev/stdin` must not fill the memory."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR)  # holds both ends open: there is never an end
    os.write(reader, b"x" * 100)
    try:
        assert refused(path) == "it is larger than 10 bytes"
    finally:
        os.close(reader)


def test_a_pipe_that_nobody_writes_to_is_given_up(tmp_path, monkeypatch):
    """A command that waits for ever and says nothing looks like one that hangs."""
    monkeypatch.setattr(given_files, "PIPE_WAIT_S_MAX", 0.05)
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == "nothing came through this pipe for 0.05 s"


def test_text_that_is_none_names_the_byte(tmp_path):
    """A compressed file under the wrong name would be parsed as nonsense."""
    (tmp_path / "file").write_bytes(b"name: \xff")
    with pytest.raises(GivenFileError, match="byte 6 is not UTF-8"):
        read_given_text(tmp_path / "file", 100)


def test_a_long_file_is_opened_and_a_pipe_that_nobody_writes_into_is_refused(tmp_path, monkeypatch):
    """The log to be replayed may be a pipe; one without a writer would hang for good."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(b"0123"))
    writer.start()
    with open_given(path) as stream:
        assert stream.read() == b"0123"
    writer.join()
    monkeypatch.setattr(given_files, "PIPE_WAIT_S_MAX", 0.05)
    with pytest.raises(GivenFileError, match="nobody opened this pipe to write into it"):
        open_given(path)
    path.write_bytes(b"")  # lets the reader that still waits go
    for place, reason in (
        (tmp_path, "it is a directory"),
        (Path("/dev/zero"), "it is a device"),
        (tmp_path / "none", "No such file"),
        (tmp_path / "a\0b", "null"),
    ):
        with pytest.raises(GivenFileError, match=reason):
            open_given(place)
