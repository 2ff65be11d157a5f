"""A timeline as one SVG file that needs nothing else: light and dark, with what each bar has to say on hover.

Owns: pixels. Must not know: files. It draws the strips that a terminal would show, so it stays small however long the
answer is; `specpipe.timeline.page` has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from specpipe.timeline.assets import HATCHED, asset
from specpipe.timeline.axis import ticks
from specpipe.timeline.model import MEANINGS, Bar, Lane, Mark, Timeline, Tone
from specpipe.timeline.scale import Scale, shares_of
from specpipe.timeline.strips import Strip, select, tones_in
from specpipe.timeline.words import HOW_TO_READ, answer_words, drafting_words, headline, lanes_words

WIDTH: Final = 1120
LEFT: Final = 92  # names of lanes
PLOT: Final = WIDTH - LEFT - 16
ROW: Final = 24
GAP: Final = 26  # between lanes: links cross it
MARKS: Final = 15
CHAR: Final = 6.2  # of a label, on average
ROUND_WIDTH_WANTED: Final = 110
LEGEND_COLUMNS: Final = 3
UNPRINTABLE: Final = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 0xFFFE, 0xFFFF), "\N{REPLACEMENT CHARACTER}")


def render(timeline: Timeline, *, wanted: tuple[int, int] | None = None) -> str:
    """The text of the file. Raises ConfigError as `select` does."""
    selection = select(timeline, per_strip=PLOT // ROUND_WIDTH_WANTED, wanted=wanted)
    drawing = Drawing()
    drawing.summary(timeline)
    if selection.num_left_out:
        drawing.overview(timeline)
    for strip in selection.strips:
        drawing.strip(strip, timeline.lanes)
    if selection.num_left_out:
        drawing.line(f"{selection.num_left_out} rounds are not drawn.", "dim")
    drawing.legend(tones_in(timeline.lanes, selection.strips))
    return drawing.text(headline(timeline), f"{', '.join(answer_words(timeline))}. {drafting_words(timeline.totals)}")


class Drawing:
    """Grows downwards."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._y = 12.0

    def text(self, title: str, description: str) -> str:
        height = self._y + 12
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
                f'height="{height:.0f}" role="img" aria-labelledby="title description">',
                f'<title id="title">{safe(title)}</title>',
                f'<desc id="description">{safe(description)}</desc>',
                f"<style>{asset('theme.css')}{asset('svg.css')}{_tone_rules()}</style>",
                f"<defs>{''.join(_hatching(tone) for tone in HATCHED)}</defs>",
                '<rect class="paper" width="100%" height="100%"/>',
                *self._parts,
                "</svg>\n",
            ]
        )

    def summary(self, timeline: Timeline) -> None:
        self.line(headline(timeline), "title", 24)
        self.line(" · ".join(answer_words(timeline)), "", 18)
        if words := drafting_words(timeline.totals):
            self.line(words, "", 18)
        self.line(lanes_words(timeline.lanes), "dim", 18)

    def line(self, text: str, kind: str, height: int = 18) -> None:
        self._y += height
        self._text(16, self._y - 6, text, kind)

    def strip(self, strip: Strip, lanes: Sequence[Lane]) -> None:
        scale = Scale(strip.start_ms, strip.end_ms, PLOT)
        self.line(strip.title, "strip", 34)
        top = self._y + 4
        rows = list(_rows(lanes, scale, top + 32))
        bottom = max((row.bottom for row in rows), default=top + 32) + 8
        self._parts += [*_bands(strip, scale, top, bottom), *_axis(scale, top, bottom)]
        drafts = {bar.id: (_right(bar, scale), row.y_of(bar)) for row in rows if row.lane.is_draft for bar in row.bars}
        for row in rows:
            self._text(LEFT - 10, row.top + 16, row.lane.name, "end")
            for bar in row.bars:
                self._bar(bar, scale, row.y_of(bar), _links(bar, scale, row.y_of(bar), drafts))
            self._marks([(LEFT + scale.place(m.at_ms), m.text, m.details) for m in row.marks], row.bottom - MARKS)
        self._y = bottom

    def _bar(self, bar: Bar, scale: Scale, y: float, links: str) -> None:
        x, tone = LEFT + scale.place(bar.start_ms), bar.tone.value
        width = _right(bar, scale) - x
        failed = " failed" if bar.is_failed else ""
        label = next((text for text in bar.labels if len(text) * CHAR + 6 <= width), "")
        self._parts.append(
            f'<g class="bar"><title>{safe(chr(10).join(bar.details))}</title>'
            f'<rect class="{tone}{failed}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW - 3}" rx="3"/>'
        )
        if label:
            self._text(x + width / 2, y + 14.5, label, f"middle {tone}-ink")
        self._parts.append(f"{links}</g>")

    def _marks(self, marks: Sequence[tuple[float, str, Sequence[str]]], y: float) -> None:
        free_from = 0.0
        for index, (x, text, details) in enumerate(marks):
            limit = marks[index + 1][0] if index + 1 < len(marks) else float(WIDTH)
            fits = x > free_from and x + 8 + len(text) * CHAR <= limit
            label = f'<text class="dim" x="{x + 7:.1f}" y="{y + 10:.1f}">{safe(text)}</text>' if fits else ""
            free_from = x + 8 + len(text) * CHAR if fits else free_from
            self._parts.append(
                f"<g><title>{safe(chr(10).join(details))}</title>"
                f'<path class="mark" d="M{x:.1f} {y + 1:.1f}l4 8h-8z"/>{label}</g>'
            )

    def overview(self, timeline: Timeline) -> None:
        """All of it: how much of the time each worker was at work for this request."""
        scale = Scale(0.0, timeline.duration_ms, PLOT // 3)
        self.line(f"all {len(timeline.rounds)} rounds: share of time at work", "strip", 34)
        top = self._y + 4
        self._parts += _axis(Scale(0.0, timeline.duration_ms, PLOT), top, top + 16)
        self._y += 24
        for lane in timeline.lanes:
            if lane.is_target:
                self._profile(lane.name, lane, scale, frozenset())
                self._profile("exposed", lane, scale, frozenset({Tone.EXPOSED}))
            if lane.is_draft:
                self._profile(lane.name, lane, scale, frozenset())

    def _profile(self, name: str, lane: Lane, scale: Scale, only: frozenset[Tone]) -> None:
        shares, tones = shares_of(lane, scale, only)
        if not any(shares):
            return
        height = ROW - 4
        self._text(LEFT - 10, self._y + 15, name, "end")
        for column, (share, tone) in enumerate(zip(shares, tones, strict=True)):
            if share:
                tall = max(share * height, 1.0)
                self._parts.append(
                    f'<rect class="{tone.value if tone not in HATCHED else tone.value + "-solid"}" '
                    f'x="{LEFT + 3 * column}" y="{self._y + height - tall:.1f}" width="3" height="{tall:.1f}"/>'
                )
        self._y += ROW

    def legend(self, tones: Sequence[Tone]) -> None:
        self._y += 14
        for index, tone in enumerate(tones):
            x = 16 + (index % LEGEND_COLUMNS) * (WIDTH - 32) / LEGEND_COLUMNS
            y = self._y + (index // LEGEND_COLUMNS) * 20
            self._parts.append(f'<rect class="{tone.value}" x="{x:.0f}" y="{y:.0f}" width="22" height="13" rx="3"/>')
            self._text(x + 30, y + 10.5, MEANINGS[tone], "dim")
        self._y += -(-len(tones) // LEGEND_COLUMNS) * 20
        self.line(HOW_TO_READ, "dim", 20)

    def _text(self, x: float, y: float, text: str, kind: str) -> None:
        self._parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{safe(text)}</text>')


@dataclass(frozen=True, slots=True)
class _LaneRows:
    """What of a lane is in a strip, and where."""

    lane: Lane
    bars: list[Bar]
    marks: list[Mark]
    top: float

    @property
    def rows(self) -> list[int]:
        return sorted({bar.row for bar in self.bars})

    @property
    def bottom(self) -> float:
        return self.top + ROW * len(self.rows) + (MARKS if self.marks else 0)

    def y_of(self, bar: Bar) -> float:
        return self.top + ROW * self.rows.index(bar.row)


def _rows(lanes: Sequence[Lane], scale: Scale, top: float) -> Iterator[_LaneRows]:
    for lane in lanes:
        bars = [bar for bar in lane.bars if scale.shows(bar.start_ms, bar.end_ms)]
        marks = [mark for mark in lane.marks if scale.start_ms <= mark.at_ms <= scale.end_ms]
        if bars or marks:
            yield (rows := _LaneRows(lane, bars, marks, top))
            top = rows.bottom + GAP


def _right(bar: Bar, scale: Scale) -> float:
    """A little to the left of where it ends, so that bars stand apart."""
    x, end = LEFT + scale.place(bar.start_ms), LEFT + scale.place(bar.end_ms)
    return max(end - 1, x + 1)


def _links(bar: Bar, scale: Scale, y: float, drafts: Mapping[int, tuple[float, float]]) -> str:
    """From the draft steps to the round that verified them; only where both are in sight."""
    paths = []
    for index, linked in enumerate(link for link in bar.links if link in drafts):
        from_x, from_y = drafts[linked][0] - 2, drafts[linked][1]
        to_x, to_y = LEFT + scale.place(bar.start_ms) + 4 + 5 * index, y + ROW - 3
        middle = (to_y + from_y) / 2
        paths.append(
            f'<path class="link" d="M{from_x:.1f} {from_y:.1f}C{from_x:.1f} {middle:.1f} '
            f'{to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"/>'
        )
    return "".join(paths)


def safe(text: str) -> str:
    """For XML: escaped, and without the characters that it cannot hold."""
    return escape(text.encode("utf-8", "replace").decode("utf-8").translate(UNPRINTABLE), {'"': "&quot;"})


def _bands(strip: Strip, scale: Scale, top: float, bottom: float) -> Iterator[str]:
    """Every other round has a darker ground; each has its number."""
    free_from = 0.0
    for one in strip.rounds:
        x, end = LEFT + scale.place(one.start_ms), LEFT + scale.place(one.end_ms)
        if one.number % 2:
            yield (
                f'<rect class="band" x="{x:.1f}" y="{top + 16:.1f}" width="{end - x:.1f}" '
                f'height="{bottom - top - 16:.1f}"/>'
            )
        if x >= free_from:
            yield f'<text class="dim" x="{x + 3:.1f}" y="{top + 27:.1f}">{one.number}</text>'
            free_from = x + 8 + len(str(one.number)) * CHAR


def _axis(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    for ms, text in ticks(scale.start_ms, scale.end_ms, PLOT // 110):
        x = LEFT + scale.place(ms)
        yield f'<path class="tick" d="M{x:.1f} {top + 14:.1f}V{bottom:.1f}"/>'
        if x + 3 + len(text) * CHAR <= WIDTH - 6:
            yield f'<text class="dim" x="{x + 3:.1f}" y="{top + 10:.1f}">{text}</text>'


def _tone_rules() -> str:
    rules = []
    for tone in Tone:
        name = tone.value
        fill = f"url(#hatched-{name})" if tone in HATCHED else f"var(--{name})"
        rules.append(f".{name} {{ fill: {fill}; }} .{name}-ink {{ fill: var(--{name}-ink); }}")
        if tone in HATCHED:
            rules.append(f".{name}-solid {{ fill: var(--{name}-line); }}")
            rules.append(f".{name}-ink {{ paint-order: stroke; stroke: var(--{name}); stroke-width: 4px; }}")
    return "\n".join(rules)


def _hatching(tone: Tone) -> str:
    name = tone.value
    return (
        f'<pattern id="hatched-{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" style="fill:var(--{name})"/>'
        f'<rect width="1.5" height="6" style="fill:var(--{name}-line)"/></pattern>'
    )
