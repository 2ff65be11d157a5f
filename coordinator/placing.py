"""Which of the workers that may take a session takes it.

Owns: the order of load, of prefixes computed before and of nearness, and the book of who served what. Must not know:
links, clocks, which workers may be used at all (`coordinator.pools`).

A worker with too few free KV slots for the text comes after all that have enough. Of those that are left the one that
lately served the longest common beginning of the text takes it, for it need not compute that again, unless it has
clearly more sessions than another. Else it is the one with the smallest part of its room taken; of equals, one on the
host asked for; of those, the one that has been connected longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 32  # beginnings are told apart by so many tokens; a shorter one is cheap to compute again
MAX_BLOCKS = 512  # of one text: what is beyond plays no part
MAX_ENTRIES = 32_768  # of the book: a million tokens
MAX_EXCESS = 2  # more sessions than the least loaded worker has: what a known beginning is worth
ROOM = 64  # of a worker that names no bound


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


def _keys(tokens: Sequence[int]) -> list[int]:
    """One for each whole block: of that block and all before it. Equal ones may be of other texts: that costs time."""
    keys: list[int] = []
    key = 0
    for start in range(0, min(len(tokens) // BLOCK_TOKENS, MAX_BLOCKS) * BLOCK_TOKENS, BLOCK_TOKENS):
        key = hash((key, *tokens[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys
