"""The gate before many rules: it may let too much pass, and never too little."""

from hypothesis import given
from hypothesis import strategies as st

from sidecar.logs.block import Block, block_of
from sidecar.logs.gate import LEARNED_BLOCKS, Gate
from sidecar.logs.library.catalogue import entries
from sidecar.logs.patterns import Pattern

TEXTS = (
    "loss: nan",
    "(?i)Fatal ERROR",
    "out of (?:memory|space)",
    r"^\d+$",
    "NCCL .*failed",
    "a|b",
    "step [0-9]+",
    "Ünicode",
)
PATTERNS = tuple(Pattern(text) for text in TEXTS)
WORDS = st.sampled_from(
    [
        "loss: nan",
        "FATAL error",
        "fatal error",
        "out of memory",
        "7",
        "NCCL x failed",
        "a",
        "step 1",
        "ünicode",
        "Ünicode",
        "",
        "\u212a",
        "error \u017ftep 1",
    ]
)


@given(st.lists(st.lists(WORDS | st.text(max_size=8), max_size=6), max_size=3 * LEARNED_BLOCKS))
def test_no_block_with_a_match_is_kept_from_its_rule(blocks):
    """A fault would be missed because nobody looked."""
    gate = Gate(PATTERNS)
    for lines in blocks:
        block = block_of([line.replace("\r", " ").replace("\x00", "") for line in lines])
        passing = gate.passing(block)
        for index, pattern in enumerate(PATTERNS):
            assert index in passing or not len(pattern.hits(block)), TEXTS[index]


def test_every_shipped_rule_passes_with_its_own_lines():
    """A rule of the library would never be asked."""
    shipped = tuple(entries().values())
    gate = Gate([entry.rule.pattern for entry in shipped])
    for index, entry in enumerate(shipped):
        for example in entry.examples:
            assert index in gate.passing(block_of([example.line]))


def test_rules_that_cannot_match_are_kept_out_of_a_healthy_block():
    """Every rule would cost its share of every line."""
    gate = Gate(PATTERNS)
    quiet = Block(b"nothing of it\n" * 100)
    assert gate.passing(quiet) == {3, 5}  # the two without a literal


def test_what_stands_in_every_block_is_no_longer_looked_for_first():
    """A step line in each block would make the gate ask which, over and over."""
    gate = Gate(PATTERNS)
    steps = Block(b"step 1\nstep 2\n")
    for _ in range(LEARNED_BLOCKS):
        assert 6 in gate.passing(steps)
    assert gate.passing(Block(b"quiet\n")) == {3, 5, 6}
