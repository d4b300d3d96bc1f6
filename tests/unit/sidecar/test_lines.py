"""Bytes to lines."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sidecar.logs.lines import LineSplitter


def test_half_a_line_is_not_a_line():
    """`loss: 12` of `loss: 12345` would be judged as it stands."""
    lines = LineSplitter()
    assert lines.feed(b"a\nloss: 12") == ["a"]
    assert lines.partial == "loss: 12"
    assert lines.feed(b"345\n") == ["loss: 12345"]
    assert lines.partial == ""


def test_a_progress_bar_that_rewrites_its_line_gives_lines():
    """Everything behind a bar would be one line without end."""
    lines = LineSplitter()
    assert lines.feed(b"10%\r20%\r\n\n30%\r") == ["10%", "20%", "30%"]


def test_bytes_that_are_not_text_are_kept_as_marks_and_counted():
    """One bad byte must not end the watch."""
    lines = LineSplitter()
    assert lines.feed(b"a\xffb\nFATAL\n") == ["a\ufffdb", "FATAL"]
    assert lines.undecodable == 1


def test_a_character_cut_by_a_read_is_put_together():
    """Text of other languages would be garbled at every read's end."""
    lines = LineSplitter()
    encoded = "Verlust über\n".encode()
    assert [line for byte in encoded for line in lines.feed(bytes([byte]))] == ["Verlust über"]
    assert lines.undecodable == 0


def test_a_line_without_end_is_cut_and_counted():
    """A binary dump on standard output would fill the node's memory."""
    lines = LineSplitter(partial_bytes_max=10)
    assert lines.feed(b"x" * 25) == ["x" * 10] * 2
    assert lines.partial == "x" * 5
    assert lines.feed(b"y\n") == ["xxxxxy"]
    assert lines.cut == 1
    assert lines.feed(b"z" * 11 + b"\nend\n") == ["z" * 10, "z", "end"]
    assert lines.cut == 2


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=8))
def test_how_bytes_arrive_changes_no_line(data, cuts):
    """What is found would depend on the timing of reads."""
    data = data + b"\n"
    at_once = LineSplitter().feed(data)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = LineSplitter()
    lines = [
        line for start, end in itertools.pairwise(edges) for line in pieces.feed(data[start:end])
    ]
    assert lines == at_once
    assert pieces.partial == ""
