"""Rows of characters: bars, labels and shares of time on a line of a terminal.

Owns: which glyphs stand for what, and what a row looks like where bars are narrower than a character. Must not know:
lanes, strips, words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.style import Style
from rich.text import Text

from specpipe.timeline.model import Bar, Tone
from specpipe.timeline.scale import Scale

STYLES: Final = {
    Tone.HIT: Style(color="blue", bold=True),
    Tone.LOOKUP: Style(color="magenta", bold=True),
    Tone.MISS: Style(color="yellow", bold=True),
    Tone.PLAIN: Style(bold=True),
    Tone.ACCEPTED: Style(color="green"),
    Tone.REJECTED: Style(color="cyan"),
    Tone.WASTED: Style(dim=True),
    Tone.PREFILL: Style(),
    Tone.EXPOSED: Style(color="red"),
    Tone.QUEUED: Style(dim=True),
    Tone.OTHER: Style(),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How a bar is drawn: its ends, what lies between, and all of it where there is room for one character only."""

    left: str
    middle: str
    right: str
    narrow: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    shapes: dict[Tone, Shape]
    several: str  # more than one bar where there is room for one character
    shares: str  # from nothing to all
    mark: str
    dot: str  # between the parts of a line


_UNICODE_SHAPES: Final = {
    Tone.HIT: Shape("┣", "━", "┫", "┃"),
    Tone.LOOKUP: Shape("┠", "─", "┨", "┃"),
    Tone.MISS: Shape("┣", "╍", "┫", "╏"),
    Tone.PLAIN: Shape("┣", "━", "┫", "┃"),
    Tone.ACCEPTED: Shape("╞", "═", "╡", "║"),
    Tone.REJECTED: Shape("├", "─", "┤", "│"),
    Tone.WASTED: Shape("├", "┄", "┤", "┆"),
    Tone.PREFILL: Shape("┣", "━", "┫", "┃"),
    Tone.EXPOSED: Shape("░", "░", "░", "░"),
    Tone.QUEUED: Shape("·", "·", "·", "·"),
    Tone.OTHER: Shape("├", "─", "┤", "│"),
}
_ASCII_SHAPES: Final = {
    Tone.HIT: Shape("[", "=", "]", "|"),
    Tone.LOOKUP: Shape("[", "-", "]", "|"),
    Tone.MISS: Shape("[", "~", "]", "!"),
    Tone.PLAIN: Shape("[", "=", "]", "|"),
    Tone.ACCEPTED: Shape("<", "=", ">", "I"),
    Tone.REJECTED: Shape("<", "-", ">", "i"),
    Tone.WASTED: Shape("<", " ", ">", "'"),
    Tone.PREFILL: Shape("[", "=", "]", "|"),
    Tone.EXPOSED: Shape(":", ":", ":", ":"),
    Tone.QUEUED: Shape(".", ".", ".", "."),
    Tone.OTHER: Shape("<", "-", ">", "I"),
}
UNICODE: Final = Glyphs(shapes=_UNICODE_SHAPES, several="╫", shares=" ▁▂▃▄▅▆▇█", mark="▴", dot="·")
ASCII: Final = Glyphs(shapes=_ASCII_SHAPES, several="*", shares=" .:-=+*#@", mark="^", dot="-")


def bar_row(bars: Iterable[Bar], scale: Scale, glyphs: Glyphs) -> Text:
    """Bars of one row, sorted by start, none overlapping another."""
    cells = [" "] * scale.num_columns
    styles: list[Style | None] = [None] * scale.num_columns
    taken = 0  # columns before this one are
    for bar in bars:
        first, end = scale.column(bar.start_ms), scale.column(bar.end_ms)
        first = min(first, scale.num_columns - 1)
        if max(end, first + 1) <= taken:
            cells[taken - 1] = glyphs.several
            continue
        first = max(first, taken)
        text = _drawn(bar, max(end - first, 1), glyphs)
        cells[first : first + len(text)] = text
        styles[first : first + len(text)] = [STYLES[bar.tone]] * len(text)
        taken = first + len(text)
    return _text_of(cells, styles)


def _drawn(bar: Bar, width: int, glyphs: Glyphs) -> str:
    shape = glyphs.shapes[bar.tone]
    if width == 1:
        return shape.narrow
    room = width - 2
    label = next((text for text in bar.labels if len(text) <= room), "")
    if label and len(label) + 2 <= room:
        label = f" {label} "
    return shape.left + label.center(room, "\0").replace("\0", shape.middle) + shape.right


def label_row(labels: Iterable[tuple[int, str]], num_columns: int, *, short: str = "") -> Text:
    """Texts at columns, sorted; one that would run into the next is left out, or is `short` if that still fits."""
    cells = [" "] * num_columns
    placed = list(labels)
    free_from = 0
    for index, (column, text) in enumerate(placed):
        limit = placed[index + 1][0] if index + 1 < len(placed) and short else num_columns
        shown = text if column + len(text) <= limit else short
        if column < free_from or not shown or column + len(shown) > num_columns:
            continue
        cells[column : column + len(shown)] = shown
        free_from = column + len(shown) + (0 if short else 1)
    return Text("".join(cells), style=Style(dim=True))


def share_row(shares: Sequence[float], tones: Sequence[Tone], glyphs: Glyphs) -> Text:
    """One character a column, the higher the larger the share of its time; anything at all is visible."""
    levels = len(glyphs.shares) - 1
    cells = [glyphs.shares[min(max(round(share * levels), 1 if share > 0 else 0), levels)] for share in shares]
    return _text_of(cells, [STYLES[tone] for tone in tones])


def _text_of(cells: Sequence[str], styles: Sequence[Style | None]) -> Text:
    text = Text(no_wrap=True, overflow="crop")
    for cell, style in zip(cells, styles, strict=True):
        text.append(cell, style)
    return text
