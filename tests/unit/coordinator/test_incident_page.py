"""An incident's page: everything is on it, and nothing on it acts."""

import itertools
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from coordinator.html import document, element, join
from coordinator.incident_drawing import CELLS_A_ROW, strip, timeline
from coordinator.incident_page import listing, page
from coordinator.incidents import Incident
from tests.fixtures.incident_story import CULPRIT_RANK, OFFSETS_S, RANKS, story

HOSTILE = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="alert(1)">',
    "</pre></details></section><iframe src=javascript:alert(1)>",
    "' onmouseover='alert(1)",
    "&lt;b&gt; & &#60;script&#62;",
    "</style><style>*{display:none}",
    "\x1b[31mred\x1b[0m \u202egnp.exe \ud800 \x00",
    "<svg onload=alert(1)><a href=javascript:alert(1)>x</a></svg>",
)
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer",
    "h1", "h2", "h3", "p", "span", "strong", "b", "a", "ul", "li", "dl", "div", "dt", "dd",
    "table", "thead", "tbody", "tr", "th", "td", "pre", "details", "summary",
    "svg", "g", "rect", "text", "line", "circle",
}  # fmt: skip


class Reader(HTMLParser):
    """What a browser would find on a page."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    handle_startendtag = handle_starttag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_and_does_nothing(text: str) -> None:
    """A log line of a training script would run in the browser of whoever is on call."""
    found = Reader(page(story(text)))
    assert set(found.tags) <= ALLOWED
    assert found.tags.count("style") == 1
    plain = Reader(page(story("plain")))
    assert sorted(found.tags) == sorted(plain.tags), "the text changed what the page is made of"
    for name, value in found.attributes:
        assert not name.startswith("on")
        assert name != "href" or value.startswith(("/incidents", "/v1/incidents/"))
        assert name not in ("src", "srcset", "action", "style")
    assert not re.search(r"[\x00-\x08\x1b\u202e\ud800]", page(story(text)))


def test_a_hostile_id_leads_nowhere_else() -> None:
    """A job's name comes from a file that somebody wrote."""
    evil = Incident(
        id='"><script>x</script>',
        job="<b>j</b>",
        generation=1,
        topology_version=1,
        trigger="t",
    )
    for markup in (page(evil), listing("<i>j</i>", [evil])):
        found = Reader(markup)
        assert set(found.tags) <= ALLOWED
        links = [value for name, value in found.attributes if name == "href"]
        assert all(link.startswith(("/incidents", "/v1/incidents/")) for link in links)
        assert all("<" not in link and '"' not in link for link in links)


def test_everything_that_a_person_asks_is_on_the_page() -> None:
    """Whoever writes the postmortem would have to ask the journal by hand."""
    found = Reader(page(story())).text
    for words in (
        "Incident llama-0007",
        "recovered",
        f"rank {CULPRIT_RANK} on node-07, GPU 3",
        "gpu fatal",
        "process_level_restart",
        "33.4 s",
        "attributed on direct evidence, confidence high",
        "one collective behind",
        "What speaks for somebody else",
        "rank 60 ended with exit code 1",
        "Left out from now on: node-07.",
        "/ckpt/4100",
        "every rank confirmed it",
        "node-16",
        "all_reduce (distributed_c10d.py:2810)",
        "step 4181 | loss 2.113",
        "state D, asleep in",
        "seq 9941 all_reduce 512 MiB, not completed",
        "node-11 gave no stacks",
        "noticing",
        "loading, first step",
    ):
        assert words in found, words


def test_the_page_needs_nothing_but_itself() -> None:
    """At night the network is what is broken."""
    markup = page(story())
    assert "http://" not in markup
    assert "https://" not in markup
    assert "<script" not in markup
    assert "url(" not in markup
    assert markup.startswith("<!DOCTYPE html>")


def test_an_incident_of_which_nothing_is_known_yet_has_a_page_too() -> None:
    """The page is opened while the fault is a second old."""
    bare = Incident(id="j-1", job="j", generation=1, topology_version=1, trigger="crash on a")
    found = Reader(page(bare)).text
    assert "Nothing has been judged yet." in found
    assert "not decided yet" in found


def test_the_drawing_has_a_bar_for_every_phase_in_proportion() -> None:
    """A picture that lies about seconds sends people to the wrong phase."""
    drawn = timeline(story())
    assert drawn is not None
    root = ET.fromstring(drawn)
    bars = [it for it in root.iter("rect") if it.get("class", "").startswith("bar")]
    offsets = list(OFFSETS_S.values())
    spans = [after - before for before, after in itertools.pairwise(offsets)]
    widths = [float(bar.get("width", "0")) for bar in bars]
    assert len(bars) == len(spans)
    scale = widths[0] / spans[0]
    for width, span in zip(widths, spans, strict=True):
        assert width == pytest.approx(max(2.0, span * scale), abs=0.2)
    assert len(list(root.iter("circle"))) == 2, "one tick for each report"


def test_the_strip_has_a_cell_for_every_rank_and_marks_the_odd_one() -> None:
    """In a row of a thousand equal positions nobody finds the one that differs."""
    drawn = strip(story())
    assert drawn is not None
    root = ET.fromstring(drawn)
    cells = list(root.iter("rect"))
    assert len(cells) == RANKS
    odd = [place for place, it in enumerate(cells) if it.get("class") != "cell same"]
    assert odd == [CULPRIT_RANK]
    assert cells[CULPRIT_RANK].get("class") == "cell culprit"
    assert float(cells[CULPRIT_RANK].get("x", "0")) == (CULPRIT_RANK % CELLS_A_ROW) * 16 + 1
    titles = [it.findtext("title") for it in root.iter("g")]
    assert titles[CULPRIT_RANK] == (
        f"rank {CULPRIT_RANK} on node-07: step 4181, collective 9940, backward, culprit"
    )


def test_only_elements_are_not_escaped() -> None:
    """One forgotten escape is enough."""
    assert element("p", "<b>", element("b", "x")) == "<p>&lt;b&gt;<b>x</b></p>"
    assert join("<", 3, None) == "&lt;3"
    assert join("a ", element("b", "x"), "  y\n") == "a <b>x</b> y "
    assert join(" ") == " "
    assert element("a", "x", href='"><b>') == '<a href="&quot;&gt;&lt;b&gt;">x</a>'
    assert "<title>&lt;b&gt;</title>" in document("<b>", "p { margin: 0 }", "x")
