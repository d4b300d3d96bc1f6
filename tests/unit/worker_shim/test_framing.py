import json
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_shim.framing import FRAME_BYTES_MAX, BadFrame, Decoder, FrameTooLargeError, encode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda it: st.lists(it, max_size=3)
)
MESSAGES = st.dictionaries(st.text(), JSON, max_size=4)


def raw(payload):
    return struct.pack(">I", len(payload)) + payload


def test_a_frame_is_a_big_endian_length_and_json():
    """A client written for the published protocol would not be understood."""
    assert encode({"type": "init"}) == b'\x00\x00\x00\x0f{"type":"init"}'


def test_a_message_that_names_a_file_without_utf8_is_still_heard():
    """The one word of a failure would be refused for the name of the file that is missing."""
    name = os.fsdecode(b"/data/\xffshard")
    frame = encode({"type": "job_fault", "message": f"cannot open {name}, é"})
    assert Decoder().feed(frame) == [
        {"type": "job_fault", "message": "cannot open /data/?shard, é"}
    ]


@given(st.lists(MESSAGES, max_size=5), st.integers(1, 7))
def test_any_cut_of_the_stream_gives_the_same_messages(messages, size):
    """A message split by the kernel would be lost."""
    stream = b"".join(encode(message) for message in messages)
    decoder, heard = Decoder(), []
    for at in range(0, len(stream), size):
        heard += decoder.feed(stream[at : at + size])
    assert heard == messages


def test_c71_a_header_in_two_pieces_and_two_frames_in_one_are_cut_where_they_end():
    """A frame read too early, or a length that begins in the middle, spoils all that follow."""
    decoder = Decoder()
    pieces = ("0000", "000e7b2261223a", "20312c2262223a327d00000008", "7b2263223a20317d")
    heard = [decoder.feed(bytes.fromhex(piece)) for piece in pieces]
    assert heard == [[], [], [{"a": 1, "b": 2}], [{"c": 1}]]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "frame is empty"),
        (b"[1]", "frame is a JSON list, not an object"),
        (b"null", "frame is a JSON NoneType, not an object"),
        (b"\xff\xfe", "frame is not UTF-8"),
        (b"{", "frame is not JSON: JSONDecodeError"),
        (b'{"loss": NaN}', "frame is not plain JSON: a number is not finite"),
        (b'{"loss": [-Infinity]}', "frame is not plain JSON: a number is not finite"),
        (b'{"step": 1e999}', "frame is not plain JSON: a number is not finite"),
        (b'{"a": {"b": 1, "b": 1}}', "frame is not plain JSON: a key stands twice in one object"),
        (b'{"n": ' + b"9" * 5000 + b"}", "frame is not JSON: ValueError"),
        (b"[" * 100_000, "frame is not JSON: RecursionError"),
    ],
)
def test_a_bad_frame_is_reported_in_its_place_and_the_next_one_is_read(payload, reason):
    """One bad client would silence a node."""
    heard = Decoder().feed(encode({"n": 1}) + raw(payload) + encode({"n": 2}))
    assert heard == [{"n": 1}, BadFrame(reason=reason), {"n": 2}]


def test_a_length_above_the_limit_ends_the_stream():
    """Four wild bytes would make the node wait for, or store, four gigabytes."""
    decoder = Decoder()
    (bad,) = decoder.feed(struct.pack(">I", FRAME_BYTES_MAX + 1) + encode({"n": 1}))
    assert isinstance(bad, BadFrame)
    assert bad.fatal
    assert decoder.feed(encode({"n": 2})) == []


def test_a_message_above_the_limit_is_not_encoded():
    """The other end would close the connection on us."""
    with pytest.raises(FrameTooLargeError, match="above the limit of 1048576"):
        encode({"text": "x" * FRAME_BYTES_MAX})


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_noise_never_raises(chunks):
    """Whoever can write to the socket could end the sidecar."""
    decoder = Decoder()
    for chunk in chunks:
        for heard in decoder.feed(chunk):
            assert isinstance(heard, BadFrame) or json.dumps(heard)
