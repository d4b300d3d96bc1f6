import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from coordinator.wording import natural_key, one_line, rank_list, signal_name


def test_signals_are_named():
    """'signal 11' sends a tired person to a search engine."""
    assert signal_name(9) == "SIGKILL (signal 9)"
    assert signal_name(11) == "SIGSEGV (signal 11)"
    assert signal_name(50) == "signal 50"


def test_ranks_are_listed_once_and_in_order():
    """Doubled ranks read as more victims than there are."""
    assert rank_list([3, 0, 3]) == "ranks 0, 3"
    assert rank_list([2]) == "rank 2"
    assert rank_list(range(20)).endswith("14, 15 and 4 more")


def test_terminal_sequences_are_dropped_from_foreign_text():
    """A worker's escape sequence could clear or rewrite the terminal of the person on call."""
    assert one_line("\x1b[31mboom\x1b[0m\n  at\tline 3\r") == "boom at line 3"
    assert one_line("a\x1b]0;title\x07b") == "ab"
    assert one_line("bell\x07\u202eevil") == "bell\\x07\\u202eevil"


def test_half_a_character_can_be_written():
    """A lone surrogate in a worker's message would stop the report with a traceback."""
    assert one_line("a\ud800b") == "a\\ud800b"


@given(st.text(), st.integers(8, 40))
def test_one_line_is_short_and_printable(text, limit):
    """One control character that slips through is enough to forge a line of the report."""
    result = one_line(text, limit)
    assert len(result) <= limit
    assert not any(unicodedata.category(char) in {"Cc", "Zl", "Zp"} for char in result)


@given(st.lists(st.text(max_size=8)))
def test_natural_order_is_total_and_stable(names):
    """Node names come from people; a name that cannot be ordered would stop every assignment."""
    once = sorted(names, key=natural_key)
    backwards = once[::-1]
    assert sorted(backwards, key=natural_key) == once
    assert natural_key("n" + "9" * 5000) > natural_key("n9")
