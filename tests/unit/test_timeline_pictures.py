"""The three pictures of a trace: golden lines for a terminal, and files that hold all they need."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from timeline_traces import COORDINATOR, TARGET, TraceMaker, four_rounds, long_trace

from specpipe.timeline import page, svg, terminal
from specpipe.timeline.axis import ticks
from specpipe.timeline.glyphs import ASCII, UNICODE, Glyphs
from specpipe.timeline.json_form import trace_json
from specpipe.timeline.layout import lay_out

GOLDEN = Path(__file__).parent / "golden"
SVG = "{http://www.w3.org/2000/svg}"
FETCHED = re.compile(
    r"""(?:src|href|url)\s*[=(]\s*["']?\s*(?!#)[^"')>]"""
)  # anything but a place in the document itself


@pytest.mark.parametrize(
    ("name", "width", "glyphs"),
    [("timeline", 100, UNICODE), ("timeline_ascii", 100, ASCII), ("timeline_narrow", 60, UNICODE)],
)
def test_a_short_trace_in_a_terminal(name: str, width: int, glyphs: Glyphs) -> None:
    lines = [line.plain for line in terminal.render(lay_out(four_rounds()), width=width, glyphs=glyphs)]
    assert "\n".join(lines) + "\n" == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_a_long_trace_begins_with_all_of_it_and_its_slowest_rounds_and_says_what_is_left_out() -> None:
    timeline = lay_out(long_trace(500))
    text = [line.plain for line in terminal.render(timeline, width=100, glyphs=UNICODE, more="--rounds A-B")]
    assert len(text) < 60
    assert "slowest rounds" in text
    assert any(line.startswith("all ") for line in text)
    assert re.fullmatch(r"4\d\d rounds are not drawn: --rounds A-B\.", text[-1])


def test_asked_for_rounds_are_drawn_and_no_others() -> None:
    timeline = lay_out(long_trace(500))
    text = [line.plain for line in terminal.render(timeline, width=100, glyphs=UNICODE, wanted=(41, 60))]
    numbers = [int(n) for line in text if line.startswith("round ") for n in line.split()[1:]]
    assert numbers == list(range(41, 61))
    assert "slowest rounds" not in text


def test_the_svg_is_one_document_with_words_for_who_cannot_see_it() -> None:
    root = ElementTree.fromstring(svg.render(lay_out(four_rounds())))
    assert root.get("role") == "img"
    named = {element.get("id"): element.text for element in root.iter() if element.get("id")}
    assert named["title"] == "request r-1 · demo · pipelined"
    assert "80 % hidden" in str(named["description"])
    bars = root.findall(f".//{SVG}g[@class='bar']")
    titles = [bar.findtext(f"{SVG}title") for bar in bars]
    assert any(str(title).startswith("round 2: hit, 3 of 4 verified nodes accepted\n23.0 ms") for title in titles)
    assert len(root.findall(f".//{SVG}path[@class='link']")) == 2


@pytest.mark.parametrize("num_rounds", [1, 30, 500])
def test_the_svg_stays_small_and_bars_stay_in_sight(num_rounds: int) -> None:
    text = svg.render(lay_out(long_trace(num_rounds)))
    root = ElementTree.fromstring(text)
    assert len(text) < 200_000
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("rx"):
            assert float(rect.get("x", "-1")) >= 0
            assert float(rect.get("x", "0")) + float(rect.get("width", "0")) <= svg.WIDTH


class Document(HTMLParser):
    """Checks that elements are closed in order."""

    VOID = ("meta", "input", "link", "br", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.bars: list[dict[str, str | None]] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if str(attributes.get("class", "")).startswith("bar "):
            self.bars.append(attributes)
        if "id" in attributes:
            self.ids.append(str(attributes["id"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("num_rounds", [1, 30])
def test_the_page_is_one_document_with_a_bar_for_every_step_and_its_links(num_rounds: int) -> None:
    timeline = lay_out(long_trace(num_rounds))
    document = Document()
    document.feed(page.render(timeline))
    document.close()
    assert document.open == []
    assert len(document.bars) == sum(len(lane.bars) for lane in timeline.lanes)
    assert len(document.ids) == len(set(document.ids))
    linked = {link for bar in document.bars for link in str(bar.get("data-links") or "").split()}
    assert linked <= set(document.ids)
    assert {int(str(bar["data-round"])) for bar in document.bars if "data-round" in bar} == set(
        range(1, num_rounds + 1)
    )


@pytest.mark.parametrize("draw", [svg.render, page.render])
def test_files_ask_for_nothing_from_elsewhere(draw: object) -> None:
    text = draw(lay_out(long_trace(20)))  # type: ignore[operator]
    without_names = text.replace("http://www.w3.org/2000/svg", "")
    assert "http:" not in without_names
    assert "https:" not in without_names
    assert "@import" not in text
    assert not FETCHED.search(without_names)
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("draw", [svg.render, page.render])
def test_what_a_caller_named_cannot_become_markup(draw: object) -> None:
    make = TraceMaker()
    evil = "</title></svg><script>alert(1)</script>\"'\x00\x1b\ud800"
    make.add("generate", 0.0, 9.0, COORDINATOR, request_id=evil, error=evil, events=((evil, 1.0),))
    make.add("verify", 0.0, 9.0, TARGET, round=1, worker=evil)
    make.add(evil, 0.0, 9.0, TARGET)
    text = draw(lay_out(make.trace()))  # type: ignore[operator]
    assert "<script>alert" not in text
    if draw is svg.render:
        ElementTree.fromstring(text)


def test_as_json_a_trace_has_its_spans_rounds_and_sums() -> None:
    told = trace_json(four_rounds())
    assert told["request_id"] == "r-1"
    assert [one["outcome"] for one in told["rounds"]] == ["none", "hit", "miss", "lookup"]
    assert told["totals"]["hidden_share"] == 0.8
    verify = next(span for span in told["spans"] if span["links"])
    assert verify["process"]["role"] == "target-worker"
    assert len(verify["span_id"]) == len(verify["links"][0]) == 16


@pytest.mark.parametrize(("start", "end"), [(0.0, 1e-4), (3.0, 17.0), (0.0, 999.0), (5e3, 6e4), (0.0, 1e7)])
def test_an_axis_has_a_few_ticks_at_round_numbers_in_order(start: float, end: float) -> None:
    found = list(ticks(start, end, 8))
    assert 2 <= len(found) <= 9
    assert all(start <= when <= end for when, _ in found)
    assert [when for when, _ in found] == sorted({when for when, _ in found})
    assert len({text for _, text in found}) == len(found)


def test_the_picture_in_the_readme_is_one_of_ours_and_small() -> None:
    picture = Path(__file__).parents[2] / "docs" / "images" / "trace.svg"
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    assert root.get("role") == "img"
    assert root.find(f".//{SVG}path[@class='link']") is not None
    assert picture.stat().st_size < 200_000
