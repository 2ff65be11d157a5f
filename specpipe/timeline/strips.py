"""Which parts of a long timeline are drawn, and where each begins and ends.

Owns: cutting the time into strips of a few rounds each, so that every round stays wide enough to read; the choice of
strips when there are too many. Must not know: how a strip is drawn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from specpipe.errors import ConfigError
from specpipe.timeline.model import MEANINGS, Lane, Round, Timeline, Tone

MAX_STRIPS: Final = 5  # drawn unasked; of a longer timeline the beginning and what was slowest
NARROWEST: Final = 0.5  # a round may get this share of the room of a typical one
SHORT_PROLOGUE: Final = 0.3  # of the first rounds' length
TAIL: Final = 0.15  # of a strip's length: what is shown of the time after the last round


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    title: str
    start_ms: float
    end_ms: float
    rounds: tuple[Round, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    strips: tuple[Strip, ...]
    num_left_out: int  # rounds
    slowest: tuple[Round, ...]  # if any were left out


def parse_rounds(text: str) -> tuple[int, int]:
    """ "7-20" or "7". Raises ConfigError."""
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and first.isascii() and (not dash or (last.isdecimal() and last.isascii()))):
        raise ConfigError(f"--rounds must be one round or a range like 7-20, got {text[:40]!r}")
    numbers = int(first), int(last or first)
    if not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError(f"--rounds must go up, from 1 at least, got {text[:40]!r}")
    return numbers


def select(timeline: Timeline, *, per_strip: int, wanted: tuple[int, int] | None = None) -> Selection:
    """The strips to draw, `per_strip` rounds in each where they are of one length.

    `wanted`: all of these rounds and nothing else; raises ConfigError if the request had none of them.
    """
    if wanted is not None:
        rounds = [one for one in timeline.rounds if wanted[0] <= one.number <= wanted[1]]
        if not rounds:
            raise ConfigError(_none_of(wanted, timeline.rounds))
        return Selection(strips=tuple(_cut(rounds, timeline, per_strip)), num_left_out=0, slowest=())
    strips = _with_prologue(list(_cut(timeline.rounds, timeline, per_strip)), timeline)
    if len(strips) <= MAX_STRIPS:
        return Selection(strips=tuple(strips), num_left_out=0, slowest=())
    slowest = tuple(sorted(timeline.rounds, key=lambda one: -one.duration_ms)[:5])
    shown = [*strips[:2], *_around(slowest, strips[2:])]
    num_shown = len({one.number for strip in shown for one in strip.rounds})
    return Selection(strips=tuple(shown), num_left_out=len(timeline.rounds) - num_shown, slowest=slowest)


def _none_of(wanted: tuple[int, int], rounds: Sequence[Round]) -> str:
    if not rounds:
        return "the request has no rounds yet"
    return f"--rounds {wanted[0]}-{wanted[1]}: the request has rounds {rounds[0].number} to {rounds[-1].number}"


def _with_prologue(strips: list[Strip], timeline: Timeline) -> list[Strip]:
    """What happened before the first round: in a strip of its own unless that would be a short one."""
    end_ms = strips[0].start_ms if strips else timeline.duration_ms
    if strips and end_ms <= SHORT_PROLOGUE * (strips[0].end_ms - end_ms):
        return [replace(strips[0], start_ms=0.0), *strips[1:]]
    title = "before the first round" if strips else "so far"
    return [Strip(title=title, start_ms=0.0, end_ms=end_ms, rounds=()), *strips] if end_ms > 0 else strips


def _cut(rounds: Sequence[Round], timeline: Timeline, per_strip: int) -> Iterator[Strip]:
    """Strips of about as many rounds each; a round that would leave the others no room gets one of its own."""
    num_strips = max(math.ceil(len(rounds) / per_strip), 1)
    per_strip = max(math.ceil(len(rounds) / num_strips), 1)
    part: list[Round] = []
    for one in rounds:
        if part and not _fits([*part, one], per_strip):
            yield _strip(part, timeline)
            part = []
        part.append(one)
    if part:
        yield _strip(part, timeline)


def _fits(part: Sequence[Round], per_strip: int) -> bool:
    if len(part) > per_strip:
        return False
    total = sum(one.duration_ms for one in part)
    return statistics.median_low(one.duration_ms for one in part) >= NARROWEST * total / per_strip


def _strip(part: Sequence[Round], timeline: Timeline) -> Strip:
    first, last = part[0], part[-1]
    is_last = last.number == timeline.rounds[-1].number
    tail_ms = min(timeline.duration_ms - last.end_ms, TAIL * (last.end_ms - first.start_ms)) if is_last else 0.0
    title = f"round {first.number}" if first is last else f"rounds {first.number} to {last.number}"
    end_ms = max(last.end_ms + max(tail_ms, 0.0), first.start_ms)
    return Strip(title=title, start_ms=first.start_ms, end_ms=end_ms, rounds=tuple(part))


def _around(slowest: Sequence[Round], strips: Sequence[Strip]) -> list[Strip]:
    """The two strips in which the slowest rounds are, in order of time."""
    found: list[Strip] = []
    for one in slowest:
        found += [strip for strip in strips if one in strip.rounds and strip not in found]
    return sorted(found[:2], key=lambda strip: strip.start_ms)


def tones_in(lanes: Iterable[Lane], strips: Sequence[Strip]) -> list[Tone]:
    """What bars in these strips show, in the order of MEANINGS."""
    bars = [bar for lane in lanes for bar in lane.bars]
    return _sorted_tones(
        bar.tone for bar in bars if any(bar.start_ms < strip.end_ms and bar.end_ms > strip.start_ms for strip in strips)
    )


def tones_in_lanes(lanes: Iterable[Lane]) -> list[Tone]:
    """The same, of all bars."""
    return _sorted_tones(bar.tone for lane in lanes for bar in lane.bars)


def _sorted_tones(tones: Iterable[Tone]) -> list[Tone]:
    found = set(tones)
    return [tone for tone in MEANINGS if tone in found and tone is not Tone.OTHER]
