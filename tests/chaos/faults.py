"""What goes wrong, and when: a schedule of faults drawn from a seed.

Owns: the kinds of faults and how they are dealt. Must not know: processes, networks, time. Pure: one seed,
one schedule.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


class Kind(enum.Enum):
    KILL = "SIGKILL"
    TERM = "SIGTERM"
    FREEZE = "SIGSTOP, then SIGCONT"
    CUT = "connections reset"
    HOLD = "nothing arrives, and nobody is told"
    SLOW = "each piece comes late"
    SHUFFLE = "messages lost, doubled, late, out of order"
    LOSS = "packets lost at random"
    RATE = "few bytes a second"


class Way(enum.Enum):
    """A direction on a link."""

    THERE = "from who dialled"
    BACK = "to who dialled"


class Phase(enum.Enum):
    """What goes on when the fault strikes."""

    IDLE = "idle"
    PREFILL = "in prefill"
    ROUNDS = "in rounds"


OF_PROCESSES = (Kind.KILL, Kind.TERM, Kind.FREEZE)
HARMLESS = (Kind.SLOW, Kind.SHUFFLE)  # nobody is out of reach by them
WAYS = ((Way.THERE,), (Way.BACK,), (Way.THERE, Way.BACK))
LOST_AFTER_S = 5.0  # a worker that is silent for longer is taken for lost: faults last less, or more


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    number: int  # in its schedule, from 1
    kind: Kind
    victim: str  # a process or a link, as the fleet names it
    phase: Phase
    delay_s: float  # from the phase's beginning to the blow
    lasts_s: float = 0.0  # until it is undone; 0: nothing is to be undone
    ways: tuple[Way, ...] = ()  # of a link that is held

    def __str__(self) -> str:
        ways = f" ({' and '.join(way.value for way in self.ways)})" if self.ways else ""
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"fault {self.number}: {self.victim}, {self.phase.value}: {self.kind.value}{ways}{lasts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """What faults may befall: names by sort, so that each sort gets its share however many it has."""

    processes: tuple[tuple[str, ...], ...]
    links: tuple[tuple[str, ...], ...]
    link_kinds: tuple[Kind, ...]
    shuffled: tuple[str, ...] = ()  # links whose messages can be lost, doubled and put out of order


def draw_faults(seed: int, count: int, victims: Victims) -> list[Fault]:
    """Every kind of fault on every sort of victim comes once before any comes twice."""
    rng = random.Random(seed)
    cards = _dealt(rng, _cards(victims))
    phases = _dealt(rng, tuple(Phase))
    return [_draw(rng, number, *next(cards), next(phases)) for number in range(1, count + 1)]


def _cards(victims: Victims) -> list[tuple[Kind, tuple[str, ...]]]:
    cards = [(kind, sort) for sort in victims.processes for kind in OF_PROCESSES]
    cards += [(kind, sort) for sort in victims.links for kind in victims.link_kinds]
    return cards + ([(Kind.SHUFFLE, victims.shuffled)] * 2 if victims.shuffled else [])


def _dealt(rng: random.Random, deck: Sequence[Any]) -> Iterator[Any]:
    while True:
        yield from rng.sample(deck, len(deck))


def _draw(rng: random.Random, number: int, kind: Kind, sort: tuple[str, ...], phase: Phase) -> Fault:
    return Fault(
        number=number,
        kind=kind,
        victim=rng.choice(sort),
        phase=phase,
        delay_s=rng.uniform(0.0, 0.15),
        lasts_s=_lasts_s(rng, kind),
        ways=rng.choice(WAYS) if kind is Kind.HOLD else (),
    )


def _lasts_s(rng: random.Random, kind: Kind) -> float:
    if kind in (Kind.FREEZE, Kind.HOLD):
        return rng.choice((rng.uniform(0.04, 0.8), rng.uniform(1.2, 1.8))) * LOST_AFTER_S
    return 0.0 if kind in (Kind.KILL, Kind.TERM, Kind.CUT) else rng.uniform(2.0, 8.0)
