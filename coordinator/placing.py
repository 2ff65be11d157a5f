"""Which of the workers that may take a session takes it, and which gives one to another for balance.

Owns: the order of load, of prefixes computed before and of nearness, the book of who served what, and when loads are so
unequal that sessions move. Must not know: links, clocks, which workers may be used at all (`coordinator.pools`).

A worker with too few free KV slots for the text comes after all that have enough. Of those that are left the one that
lately served the longest common beginning of the text takes it, for it need not compute that again, unless it has
clearly more sessions than another. Else it is the one with the smallest part of its room taken; of equals, one on the
host asked for; of those, the one that has been connected longest.

Sessions move from the worker with most to do to the one with least only when the difference is beyond what placement
itself makes; then one after the other until the two are level. So what ends or begins by chance moves nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

BLOCK_TOKENS = 32  # beginnings are told apart by so many tokens; a shorter one is cheap to compute again
MAX_BLOCKS = 512  # of one text: what is beyond plays no part
MAX_ENTRIES = 32_768  # of the book: a million tokens
MAX_EXCESS = 2  # more sessions than the least loaded worker has: what a known beginning is worth
ROOM = 64  # of a worker that names no bound
MIN_TO_BEGIN = 2  # sessions that a worker must give another to be level with it; placing makes smaller differences
MIN_TO_GO_ON = 1  # the same, once levelling has begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that may be given a session now."""

    number: int  # of the connection: the lower, the longer connected
    num_sessions: int
    max_sessions: int = 0  # 0: no bound
    num_free_slots: int = 0
    host: str = ""

    @property
    def load(self) -> float:
        """The part of its room that is taken."""
        return self.num_sessions / (self.max_sessions or ROOM)

    def with_more(self, num_sessions: int) -> Candidate:
        return replace(self, num_sessions=self.num_sessions + num_sessions)


class Prefixes:
    """Which worker served which beginning of a text last. What was not asked for longest is forgotten."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._served: OrderedDict[int, int] = OrderedDict()  # worker's number, by the hash of all blocks up to there
        self._max_entries = max_entries

    def __len__(self) -> int:
        return len(self._served)

    def note(self, tokens: Sequence[int], number: int) -> None:
        """This worker has all of these from now on."""
        for key in _keys(tokens):
            self._served[key] = number
            self._served.move_to_end(key)
        while len(self._served) > self._max_entries:
            self._served.popitem(last=False)

    def find(self, tokens: Sequence[int], among: dict[int, Candidate]) -> Candidate | None:
        """The one of these that served the longest beginning."""
        for key in reversed(_keys(tokens)):
            found = among.get(self._served.get(key, -1))
            if found is not None:
                return found
        return None


def choose(
    candidates: Sequence[Candidate], tokens: Sequence[int], prefixes: Prefixes, *, host: str = ""
) -> Candidate | None:
    """The worker that is to take a session of this text. `host`: where one would be nearest; empty: anywhere."""
    spacious = [candidate for candidate in candidates if candidate.num_free_slots >= len(tokens)] or candidates
    if not spacious:
        return None
    limit = min(candidate.num_sessions for candidate in spacious) + MAX_EXCESS
    known = {candidate.number: candidate for candidate in spacious if candidate.num_sessions <= limit}
    return prefixes.find(tokens, known) or min(
        spacious, key=lambda candidate: (candidate.load, not host or candidate.host != host, candidate.number)
    )


class Levelling:
    """Which worker gives a session to which other one. Has begun, or has ended: see `find`."""

    def __init__(self) -> None:
        self.has_begun = False

    def find(self, givers: Sequence[Candidate], takers: Sequence[Candidate]) -> tuple[int, int] | None:
        """Numbers of the worker that gives one session and of the one that takes it; None: all are level enough.

        `num_sessions` leaves out sessions that are going already and has those that are coming. Begins when
        MIN_TO_BEGIN sessions have to move between two workers, and ends when none has to. Without sessions that come
        and go no worker both gives and takes.
        """
        found = _find_pair(givers, takers, MIN_TO_GO_ON if self.has_begun else MIN_TO_BEGIN)
        self.has_begun = found is not None
        return found


def _find_pair(givers: Sequence[Candidate], takers: Sequence[Candidate], num_to_move: int) -> tuple[int, int] | None:
    """The worker that takes is the one with least to do; of those that have enough more, most gives."""
    if not takers:
        return None
    taker = min(takers, key=lambda candidate: (candidate.load, candidate.number))
    for giver in sorted(givers, key=lambda candidate: (-candidate.load, candidate.number)):
        if giver.number != taker.number and _has_more(giver.with_more(-num_to_move), taker.with_more(num_to_move)):
            return giver.number, taker.number
    return None


def _has_more(one: Candidate, other: Candidate) -> bool:
    """Or as much: in sessions and in parts of its room, as workers may have more room than they are fast."""
    return one.num_sessions >= other.num_sessions and one.load >= other.load


def _keys(tokens: Sequence[int]) -> list[int]:
    """One for each whole block: of that block and all before it. Equal ones may be of other texts: that costs time."""
    keys: list[int] = []
    key = 0
    for start in range(0, min(len(tokens) // BLOCK_TOKENS, MAX_BLOCKS) * BLOCK_TOKENS, BLOCK_TOKENS):
        key = hash((key, *tokens[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys
