"""A timeline as lines of a terminal, readable without colours too.

Owns: what comes below what. Must not know: terminals, files; a caller prints the lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from rich.style import Style
from rich.text import Text

from specpipe.timeline.axis import ticks
from specpipe.timeline.glyphs import STYLES, Glyphs, bar_row, label_row, share_row
from specpipe.timeline.model import MEANINGS, Lane, Round, Timeline, Tone
from specpipe.timeline.scale import Scale, shares_of
from specpipe.timeline.strips import Selection, Strip, select, tones_in
from specpipe.timeline.words import (
    HOW_TO_READ,
    ROUND_COLUMNS,
    answer_words,
    drafting_words,
    headline,
    lanes_words,
    round_cells,
)

MIN_WIDTH: Final = 40
MAX_WIDTH: Final = 240
ROUND_COLUMNS_WANTED: Final = 11  # characters of a typical round
TICK_COLUMNS: Final = 12
HARD_SPACE: Final = "\N{NO-BREAK SPACE}"
DIM: Final = Style(dim=True)
BOLD: Final = Style(bold=True)


def render(
    timeline: Timeline, *, width: int, glyphs: Glyphs, wanted: tuple[int, int] | None = None, more: str = ""
) -> list[Text]:
    """Lines of at most `width` characters (40 at least).

    `wanted`: these rounds alone. `more` is said where rounds were left out. Raises ConfigError as `select` does.
    """
    picture = _Picture(timeline, min(max(width, MIN_WIDTH), MAX_WIDTH), glyphs)
    selection = select(timeline, per_strip=max(1, picture.num_columns // ROUND_COLUMNS_WANTED), wanted=wanted)
    return list(picture.lines(selection, more))


class _Picture:
    def __init__(self, timeline: Timeline, width: int, glyphs: Glyphs) -> None:
        self._timeline = timeline
        self._width = width
        self._glyphs = glyphs
        self._margin = max([len(lane.name) for lane in timeline.lanes] + [len("exposed")]) + 2
        self.num_columns = max(width - self._margin, 10)

    def lines(self, selection: Selection, more: str) -> Iterator[Text]:
        yield from self._summary()
        if selection.num_left_out:
            yield Text()
            yield from self._overview()
            yield Text()
            yield from self._slowest(selection.slowest)
        for strip in selection.strips:
            yield Text()
            yield from self._strip(strip)
        yield Text()
        yield from self._legend(selection.strips)
        if selection.num_left_out:
            yield from self._prose(f"{selection.num_left_out} rounds are not drawn{': ' + more if more else ''}.", DIM)

    def _prose(self, text: str, style: Style | None = None) -> Iterator[Text]:
        """Wrapped, between the parts of a list if there are any."""
        text = " · ".join(part.replace(" ", HARD_SPACE) for part in text.split(" · ")) if " · " in text else text
        for line in textwrap.wrap(text, self._width, break_on_hyphens=False) or [""]:
            shown = line.replace(HARD_SPACE, " ").replace("·", self._glyphs.dot)
            yield Text(shown, style=style or "", no_wrap=True)

    def _summary(self) -> Iterator[Text]:
        yield from self._prose(headline(self._timeline), BOLD)
        yield from self._prose(" · ".join(answer_words(self._timeline)))
        if words := drafting_words(self._timeline.totals):
            yield from self._prose(words)
        yield from self._prose(lanes_words(self._timeline.lanes), DIM)

    def _row(self, name: str, cells: Text) -> Text:
        row = Text(name.ljust(self._margin), style="", no_wrap=True, overflow="crop")
        row.append_text(cells)
        row.rstrip()
        return row

    def _axis(self, title: str, scale: Scale) -> Text:
        """The title, and behind it what the columns mean."""
        marks = ticks(scale.start_ms, scale.end_ms, max(1, self.num_columns // TICK_COLUMNS))
        labels = [(scale.column(ms), text) for ms, text in marks]
        free = [(column, text) for column, text in labels if self._margin + column > len(title)]
        row = self._row("", label_row(free, self.num_columns))
        return Text.assemble((title, BOLD), row[len(title) :] if row.cell_len > len(title) else "", no_wrap=True)

    def _strip(self, strip: Strip) -> Iterator[Text]:
        scale = Scale(strip.start_ms, strip.end_ms, self.num_columns)
        yield self._axis(strip.title, scale)
        if strip.rounds:
            numbers = [(scale.column(one.start_ms), str(one.number)) for one in strip.rounds]
            yield self._row("round", label_row(numbers, self.num_columns))
        for lane in self._timeline.lanes:
            yield from self._lane(lane, scale)

    def _lane(self, lane: Lane, scale: Scale) -> Iterator[Text]:
        shown = [bar for bar in lane.bars if scale.shows(bar.start_ms, bar.end_ms)]
        marks = [mark for mark in lane.marks if scale.start_ms <= mark.at_ms <= scale.end_ms]
        rows = sorted({bar.row for bar in shown})
        for index, row in enumerate(rows):
            bars = [bar for bar in shown if bar.row == row]
            yield self._row("" if index else lane.name, bar_row(bars, scale, self._glyphs))
        if marks:
            texts = [(scale.column(mark.at_ms), f"{self._glyphs.mark}{mark.text}") for mark in marks]
            yield self._row("" if rows else lane.name, label_row(texts, self.num_columns, short=self._glyphs.mark))

    def _overview(self) -> Iterator[Text]:
        """All of it: how much of each column's time each worker was at work for this request."""
        scale = Scale(0.0, self._timeline.duration_ms, self.num_columns)
        yield self._axis("all", scale)
        for lane in self._timeline.lanes:
            if lane.is_target or lane.is_draft:
                shares, tones = shares_of(lane, scale)
                yield self._row(lane.name, share_row(shares, tones, self._glyphs))
        exposed = [shares_of(lane, scale, {Tone.EXPOSED})[0] for lane in self._timeline.lanes if lane.is_target]
        if any(map(any, exposed)):
            shares = [sum(column) for column in zip(*exposed, strict=True)]
            yield self._row("exposed", share_row(shares, [Tone.EXPOSED] * len(shares), self._glyphs))

    def _slowest(self, rounds: Sequence[Round]) -> Iterator[Text]:
        yield Text("slowest rounds", style=BOLD)
        rows = [ROUND_COLUMNS, *map(round_cells, rounds)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        while sum(widths) + 2 * (len(widths) - 1) > self._width:
            widths.pop()  # with its column
        for index, row in enumerate(rows):
            line = "  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=False))
            yield Text(line, style="" if index else DIM, no_wrap=True)

    def _legend(self, strips: Sequence[Strip]) -> Iterator[Text]:
        """What the glyphs in sight mean, as many to a line as fit."""
        line = Text(no_wrap=True)
        for tone in tones_in(self._timeline.lanes, strips):
            shape = self._glyphs.shapes[tone]
            entry = Text.assemble((shape.left + shape.middle + shape.right, STYLES[tone]), f" {MEANINGS[tone]}")
            entry.truncate(self._width)
            if line.cell_len and line.cell_len + 3 + entry.cell_len > self._width:
                yield line
                line = Text(no_wrap=True)
            line.append_text(Text("   " if line.cell_len else "").append_text(entry))
        yield line
        yield from self._prose(HOW_TO_READ, DIM)
