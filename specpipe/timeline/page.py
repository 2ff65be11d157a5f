"""A timeline as one HTML file that needs nothing else: all of it, to be zoomed and scrolled, and its rounds as a table.

Owns: the document. Must not know: files. Bars are placed by style sheet alone, from two numbers each and one scale, so
that zooming changes one number; the script (page.js) adds what moves.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from specpipe.timeline.assets import HATCHED, asset
from specpipe.timeline.model import DRAFT_TONES, MEANINGS, Bar, Lane, Round, Timeline, Tone
from specpipe.timeline.scale import Scale, shares_of
from specpipe.timeline.strips import tones_in_lanes
from specpipe.timeline.svg import safe
from specpipe.timeline.words import (
    HOW_TO_READ,
    ROUND_COLUMNS,
    answer_words,
    drafting_words,
    headline,
    lanes_words,
    ms_text,
    round_cells,
)

TYPICAL_WIDTH: Final = 130  # pixels of a typical round, at first
OVERVIEW_COLUMNS: Final = 400
MAX_LABEL_CHARS: Final = 16
PART: Final = 64  # even, so that every other round stays every other


def render(timeline: Timeline) -> str:
    """The text of the file."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{safe(headline(timeline))}</title>",
            f"<style>{asset('theme.css')}{_tone_rules()}{asset('page.css')}</style></head><body>",
            *_header(timeline),
            *_picture(timeline),
            *_table(timeline),
            f"<script>{asset('page.js')}</script></body></html>\n",
        ]
    )


def _header(timeline: Timeline) -> Iterator[str]:
    totals = timeline.totals
    yield f"<header><h1>{safe(headline(timeline))}</h1>"
    yield f"<p>{safe(' · '.join(answer_words(timeline)))}</p>"
    yield f'<p class="dim">{safe(lanes_words(timeline.lanes))}</p></header>'
    if totals.hidden_share is None:
        return
    yield f"<p>{safe(drafting_words(totals))}</p>"
    yield '<div class="split" aria-hidden="true">'
    for tone, word, ms in (("accepted", "hidden", totals.hidden_ms), ("exposed", "exposed", totals.exposed_ms)):
        if ms:
            share = ms / (totals.hidden_ms + totals.exposed_ms)
            label = f"<b>{word} {ms_text(ms)}</b>" if share > 0.15 else ""
            kind = f"{tone} {tone}-ink{'' if label else ' nothing'}"
            yield f'<span class="{kind}" style="flex:{share:.4f} 1 0">{label}</span>'
    yield "</div>"


def _picture(timeline: Timeline) -> Iterator[str]:
    typical_ms = statistics.median([one.duration_ms for one in timeline.rounds] or [timeline.duration_ms / 8]) or 1.0
    length_ms = max(timeline.duration_ms, 1e-3)
    first_ms = timeline.rounds[0].start_ms if timeline.rounds else 0.0
    yield "<h2>Timeline</h2>"
    yield (
        '<div class="tools" hidden><label for="zoom">Zoom</label><input id="zoom" type="range" min="0" max="100"/>'
        '<button id="whole" type="button">zoom out</button><button id="rounds" type="button">rounds</button>'
        '<span class="dim">arrow keys: from round to round; + and -: zoom; click or drag in the overview</span></div>'
    )
    yield from _overview(timeline)
    yield '<div class="scroll" tabindex="0" role="group" aria-label="Timeline; the table below has every round">'
    yield (
        f'<div class="plot" style="--length:{length_ms:.3f};--scale:{TYPICAL_WIDTH / typical_ms:.4f}" '
        f'data-typical="{typical_ms:.4f}" data-first="{first_ms:.3f}"><div class="rounds">'
    )
    yield from _parts(timeline.rounds)
    yield "</div>"
    for lane in timeline.lanes:
        yield from _lane(lane)
    yield '<svg class="links" aria-hidden="true"></svg></div></div>'
    yield '<output aria-live="polite" hidden><span>Point at a bar: it says here what it was.</span></output>'
    yield '<ul class="legend">'
    for tone in tones_in_lanes(timeline.lanes):
        yield f'<li><i class="{tone.value}"></i>{MEANINGS[tone]}</li>'
    yield f'</ul><p class="dim">{HOW_TO_READ}</p>'


def _lane(lane: Lane) -> Iterator[str]:
    if not lane.bars and not lane.marks:
        return
    yield f'<div class="lane" style="--rows:{lane.num_rows}"><h3 title="{safe(lane.process)}">{lane.name}</h3>'
    yield from _parts(lane.bars)
    for mark in lane.marks:
        yield (
            f'<div class="mark" style="--at:{mark.at_ms:.3f}" title="{_title(mark.details)}">▴ {safe(mark.text)}</div>'
        )
    yield "</div>"


def _parts(drawn: Sequence[Bar] | Sequence[Round]) -> Iterator[str]:
    """What lies side by side, in parts: a browser leaves alone those that are out of sight."""
    for first in range(0, len(drawn), PART):
        part = drawn[first : first + PART]
        scale = Scale(part[0].start_ms, max(one.end_ms for one in part), 100)  # columns are per cent
        yield f'<div class="part" style="--at:{scale.start_ms:.3f};--for:{scale.end_ms - scale.start_ms:.3f}">'
        for one in part:
            left = scale.place(one.start_ms)
            place = f"left:{left:.4f}%;width:{scale.place(one.end_ms) - left:.4f}%"
            yield _bar(one, place) if isinstance(one, Bar) else f'<div class="round" style="{place}">{one.number}</div>'
        yield "</div>"


def _bar(bar: Bar, place: str) -> str:
    name = bar.tone.value
    labels = bar.labels[-1:] if bar.tone in DRAFT_TONES else bar.labels  # draft steps are short
    label = next((f"<b>{safe(text)}</b>" for text in labels if len(text) <= MAX_LABEL_CHARS), "")
    row = f";--row:{bar.row}" if bar.row else ""
    links = f' data-links="{" ".join(f"s{link:x}" for link in bar.links)}"' if bar.links else ""
    own_round = f' data-round="{bar.round}"' if bar.round and bar.id else ""
    return (
        f'<div class="bar {name} {name}-ink{" failed" if bar.is_failed else ""}"'
        f"{f' id={chr(34)}s{bar.id:x}{chr(34)}' if bar.id else ''}{links}{own_round} "
        f'style="{place}{row}" title="{_title(bar.details)}">{label}</div>'
    )


def _title(details: Sequence[str]) -> str:
    return "&#10;".join(map(safe, details))


def _overview(timeline: Timeline) -> Iterator[str]:
    yield '<div class="all" aria-hidden="true" hidden>'
    scale = Scale(0.0, timeline.duration_ms, OVERVIEW_COLUMNS)
    for lane in timeline.lanes:
        if lane.is_target or lane.is_draft:
            yield f'<span class="name">{lane.name}</span>'
            yield f'<svg viewBox="0 0 {OVERVIEW_COLUMNS} 1" preserveAspectRatio="none">'
            shares, tones = shares_of(lane, scale)
            for column, (share, tone) in enumerate(zip(shares, tones, strict=True)):
                if share:
                    fill = f"var(--{tone.value}{'-line' if tone in HATCHED else ''})"
                    yield (
                        f'<rect x="{column}" y="{1 - share:.3f}" width="1.02" height="{share:.3f}" '
                        f'style="fill:{fill}"/>'
                    )
            yield "</svg>"
    yield '<div class="view"></div></div>'


def _table(timeline: Timeline) -> Iterator[str]:
    if not timeline.rounds:
        return
    yield f"<details><summary>All {len(timeline.rounds)} rounds as a table</summary><table><thead><tr>"
    yield "".join(f'<th scope="col">{name}</th>' for name in ROUND_COLUMNS) + "</tr></thead><tbody>"
    for one in timeline.rounds:
        number, outcome, *rest = round_cells(one)
        yield (
            f'<tr><td><a href="#" data-round="{number}">{number}</a></td><td class="word">{safe(outcome)}</td>'
            + "".join(f"<td>{cell}</td>" for cell in rest)
            + "</tr>"
        )
    yield "</tbody></table></details>"


def _tone_rules() -> str:
    rules = []
    for tone in Tone:
        name = tone.value
        ground = f"var(--{name})"
        if tone in HATCHED:
            line = f"var(--{name}-line)"
            ground = f"repeating-linear-gradient(135deg, {line} 0 1.5px, var(--{name}) 1.5px 6px)"
            rules.append(f".{name} b {{ background: var(--{name}); border-radius: 3px; }}")
        rules.append(f".{name} {{ background: {ground}; }} .{name}-ink {{ color: var(--{name}-ink); }}")
    return "\n".join(rules)
