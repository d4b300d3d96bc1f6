"""The fast search finds exactly what a line-by-line search finds."""

import re2
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.logs.block import Block, block_of
from sidecar.logs.literals import ALTERNATIVES_MAX, shape_of
from sidecar.logs.patterns import Pattern
from sidecar.logs.prefixes import prefix_end

PIECES = st.sampled_from(
    [
        "loss", "lm loss", "step", "abc", "abcabc", "nan", "(?:lm )?", "(?:abc)?", "s?", "(abc)?",
        ".*", ".*?", ".+", ".", r"\s*", r"\s+", r"(\d+)", r"(?P<loss>\S+)", r"(\S+)", "[:=]",
        r"[^\]]*", "(?:loss|step)", "(?:nan|inf)+", "(abc|loss: )", "a{2,3}", "x*", "^", "$",
        r"\b", r"\A", r"\z", r"\.", r"\[", "{", "é", "k", r"(?:step )+", "(?i:LOSS)", r"\w*?",
        r"([\d.]+)", r"[-+]?", r"(?:\d+|nan|x)", r"([^\]\n]*)\]", r"\s*([^\s:]+)",
        "[a-l]+", "[é]", r"[^x]",
    ]
)  # fmt: skip
PATTERNS = st.builds(
    lambda flags, parts, other: flags + "".join(parts) + (f"|{''.join(other)}" if other else ""),
    st.sampled_from(["", "", "(?i)", "(?s)"]),
    st.lists(PIECES, min_size=1, max_size=6),
    st.one_of(st.just([]), st.just([]), st.lists(PIECES, min_size=1, max_size=3)),
)
WORDS = st.sampled_from(
    [
        "loss", "LOSS", "lm loss: ", "step ", "step", "abc", "abcabc", "ab", " ", ": ", "=", "12",
        "3.5", "nan", "inf", "aa", "x", "é", "[rank0]: ", " 7: ", "]", ".", "{", "k", "\u212a",
        "lo\u017f\u017f", "\t", "A", "[", "\x00",
    ]
)  # fmt: skip
LINES = st.lists(st.lists(WORDS, max_size=8).map("".join), max_size=8)


def compiled(text: str) -> Pattern | None:
    try:
        return Pattern(text)
    except re2.error:
        return None


def one_by_one(pattern: Pattern, block: Block) -> list:
    """The definition: each line alone, without its prefix."""
    options = re2.Options()
    options.never_nl = True
    options.log_errors = False
    plain = re2.compile(f"(?m){pattern.text}", options=options)
    found, start = [], 0
    while start < len(block.data):
        end = block.data.find(b"\n", start)
        behind = prefix_end(block.data, start, end)
        match = plain.search(block.data[behind:end])
        if match is not None:
            spans = [match.span(group) for group in range(plain.groups + 1)]
            found.append([(a + behind, b + behind) if a >= 0 else (-1, -1) for a, b in spans])
        start = end + 1
    return found


@settings(max_examples=600, deadline=None)
@given(PATTERNS, LINES)
@example(r"loss (\S+).*abc", ["loss 12abc"])
@example(r".*loss[:=]\s*(\S+).*", ["loss: 1 loss: 2", "loss:", "x loss=3 loss:"])
@example(r"(?:lm )?loss: (\S+)", ["lm loss: 1", "lm lm loss: 2"])
@example(r"(?:abc)?abcabc(\d*)", ["abcabcabc12"])
@example(r"(?i)loss", ["lo\u017f\u017f"])
@example(r"step (\d+).*?abc(\d+).*loss", ["step 1 abc2 abc3 loss abc loss"])
@example(r"^step", ["[rank0]: step", " 7: step", "a step"])
@example("rank", ["[rank0]: x", "[rank0]: rank"])
@example("", ["", "a"])
def test_the_fast_search_finds_what_a_search_line_by_line_finds(text, lines):
    """A fault line would be missed by a search that is only fast."""
    pattern = compiled(text)
    if pattern is None:
        return
    block = block_of(lines)
    hits = pattern.hits(block)
    expected = one_by_one(pattern, block)
    groups = [hit[1][1:] for hit in hits]
    assert groups == [spans[1:] for spans in expected]
    line_starts = [block.data.rfind(b"\n", 0, hit[0]) for hit in hits]
    assert line_starts == [block.data.rfind(b"\n", 0, spans[0][0]) for spans in expected]


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40), LINES)
def test_an_expression_of_any_text_is_searched_as_it_is_or_refused(text, lines):
    """A rule file may hold anything; what was taken must mean what RE2 says."""
    pattern = compiled(text) if max(text, default="") < "\ud800" else None
    if pattern is None:
        return
    block = block_of([*lines, text.replace("\n", " ").replace("\x1b", "")])
    groups = [hit[1][1:] for hit in pattern.hits(block)]
    assert groups == [spans[1:] for spans in one_by_one(pattern, block)]


def test_literals_that_every_match_contains_are_found():
    """Without them every line would be asked about every rule."""
    assert shape_of(r"iteration\s+(\d+)/.*elapsed (\d+)").required[0] == (b"iteration",)
    assert shape_of("(?:CUDA out of memory|OutOfMemoryError)").required == (
        (b"CUDA out of memory", b"OutOfMemoryError"),
    )
    assert shape_of("abc|x").required == ()
    assert shape_of("(?i)LOSS").required == ((b"loss",),)
    assert shape_of(r"[[:alpha:]]loss").required == ()
    assert shape_of(r"\Qa.b\Eloss").required == ()
    assert shape_of("|".join(f"word{n}" for n in range(ALTERNATIVES_MAX + 1))).required == ()
    assert [one.literal for one in shape_of(r".*Epoch (\d+).*loss: (\S+).*").segments] == [
        b"Epoch ",
        b"loss: ",
    ]
    assert shape_of("(" * 200 + "abc" + ")" * 200).required == ()
