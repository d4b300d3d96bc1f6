"""A finished log in pieces: every line once, with its number in the file."""

import io

from hypothesis import given
from hypothesis import strategies as st

from sidecar.logs.pieces import LINE_BYTES_MAX, PIECE_BYTES, pieces


def numbered(data: bytes) -> list[tuple[int, str]]:
    """Every line that is not empty, with its number."""
    found = []
    for piece in pieces(io.BytesIO(data)):
        start = 0
        text = piece.block.data
        while start < len(text):
            line = piece.block.text(start)
            if line:
                found.append((piece.number_of(start), line))
            start = text.find(b"\n", start) + 1
    return found


def test_lines_keep_their_numbers_over_empty_ones_and_pieces():
    """A person would look at the wrong line."""
    lines = [f"line {n}" if n % 3 else "" for n in range(1, 100_000)]
    data = "\n".join(lines).encode()
    assert len(data) > 2 * PIECE_BYTES
    assert numbered(data) == [(n, line) for n, line in enumerate(lines, 1) if line]


def test_a_bar_that_rewrites_its_line_is_many_lines_with_one_number():
    """Hours of progress would be one line of megabytes."""
    assert numbered(b"a\nx 1\rx 2\rx 3\nb\n") == [
        (1, "a"),
        (2, "x 1"),
        (2, "x 2"),
        (2, "x 3"),
        (3, "b"),
    ]


def test_what_stands_behind_the_last_line_end_is_a_line():
    """A job that was killed leaves its last words without an end."""
    assert numbered(b"a\nlast") == [(1, "a"), (2, "last")]


def test_a_line_of_megabytes_is_cut_and_the_next_one_is_whole():
    """A dump of data would fill the memory."""
    data = b"x" * (3 * PIECE_BYTES) + b"\nnext\n"
    found = numbered(data)
    assert found[-1][1] == "next"
    assert all(len(line) <= PIECE_BYTES + LINE_BYTES_MAX for _, line in found)


def test_bytes_that_are_no_text_are_replaced():
    """One bad byte would hide the rest of the log."""
    assert numbered(b"caf\xff\nloss: nan\n") == [(1, "caf\ufffd"), (2, "loss: nan")]


@given(st.binary(max_size=300))
def test_no_bytes_are_lost_or_invented(data):
    """A replay would judge another log than the one it was given."""
    whole = b"".join(piece.raw for piece in pieces(io.BytesIO(data)))
    assert whole == data
    for piece in pieces(io.BytesIO(data)):
        assert piece.block.data.endswith(b"\n") or not piece.block.data
        piece.block.data.decode()
