"""Who holds which KV slot, and which slots are cached for the tokens computed in them.

Owns: the free list, the counts, and what enters and leaves the prefix cache. Must not know: torch, sessions.
Slot 0 is scratch for padding and is never handed out. A shared slot (a common prefix) is held once by each session.
When the last one releases it, it is nobody's; or, if it is cached, it stays for whoever comes with the same prefix
until slots run out. Both count as free: a cached slot that nobody holds gives way before anybody is refused.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specpipe.config import EngineConfig
from specpipe.engine.prefix_cache import PrefixCache
from specpipe.errors import CapacityError, InvariantError

EVICTION_BATCH = 64  # slots evicted at once at least, so that growth by one slot a step seldom has to look for one
MIN_IDLE = 2048  # cached slots that nobody needs to hold, however few were ever held at once ...
IDLE_PER_HELD = 2  # ... and how many times the most that were; both only where the pool is frugal


@dataclass(slots=True)
class SharingCounts:
    """What prefix sharing has done so far."""

    num_shares: int = 0  # times that a session was given slots computed by another one
    num_shared_tokens: int = 0  # tokens that it did not have to compute
    num_evicted_slots: int = 0  # cached slots that were taken for something else


class SlotPool:
    """Hands out slots 1 .. num_slots - 1, lowest free ones first, so that a session's slots tend to be neighbours.

    Without a `cache` nothing is shared. `is_frugal`: a slot takes memory when it is first written (on a CPU), so that a
    process whose cache may fill all slots grows for hours. Then only a small multiple of what was ever held at once is
    cached beyond what is held, and the process stops growing.
    """

    def __init__(self, num_slots: int, cache: PrefixCache | None = None, *, is_frugal: bool = False) -> None:
        if num_slots < 2:
            raise ValueError(f"num_slots must be at least 2 (slot 0 is scratch), got {num_slots}")
        self.num_slots = num_slots
        self.sharing = SharingCounts()
        self.version = 0  # changes when a longer prefix may be found than before
        self._free = list(range(1, num_slots))  # a heap; ascending is one
        self._counts = [0] * num_slots
        self._cache = cache
        self._is_cached = [False] * num_slots
        self._num_idle = 0  # cached and held by nobody
        self._is_frugal = is_frugal
        self._most_held = 0

    @property
    def num_free(self) -> int:
        """Slots that nobody holds, cached ones included: as many can be allocated."""
        return len(self._free) + self._num_idle

    @property
    def num_cached(self) -> int:
        """Of the free ones, those that keep what was computed in them."""
        return self._num_idle

    @property
    def num_held(self) -> int:
        return self.num_slots - 1 - self.num_free

    def can_allocate(self, count: int) -> bool:
        return count <= self.num_free

    def allocate(self, count: int) -> list[int]:
        """Return `count` slots, each held once. Raises CapacityError, and takes none, when fewer are free."""
        if not self.can_allocate(count):
            raise CapacityError(f"{count} KV slots wanted, {self.num_free} of {self.num_slots - 1} are free")
        if count > len(self._free):
            self._evict(max(count - len(self._free), min(EVICTION_BATCH, self._num_idle)))
        slots = [heapq.heappop(self._free) for _ in range(count)]
        for slot in slots:
            self._counts[slot] = 1
        self._note_held()
        return slots

    def release(self, slots: Iterable[int]) -> list[int]:
        """Give back one hold of each slot; return those that became free and are not cached.

        Raises InvariantError, before any change, if a slot is released more often than it is held.
        """
        slots = self._checked(slots)
        for slot, count in Counter(slots).items():
            if count > self._counts[slot]:
                raise InvariantError(f"slot {slot} released {count} times but held {self._counts[slot]} times")
        freed = []
        for slot in slots:
            self._counts[slot] -= 1
            if self._counts[slot] == 0 and self._is_cached[slot]:
                self._num_idle += 1
            elif self._counts[slot] == 0:
                heapq.heappush(self._free, slot)
                freed.append(slot)
        self._limit_idle()
        return freed

    def num_wanted(self, tokens: Sequence[int], adapter: str = "") -> int:
        """Slots that must be free so that `share` and `allocate` together give one to each of `tokens`."""
        held = sum(self._counts[slot] > 0 for slot in self._match(tokens, adapter))
        return len(tokens) - held

    def share(self, tokens: Sequence[int], adapter: str = "", *, more_than: int = 0) -> list[int]:
        """Return the slots of the longest prefix of `tokens` that is computed, each held once more.

        The last token is never among them: it is left to compute, as its row is what decides the next one. Empty,
        and nothing is held, if the prefix has no more than `more_than` tokens.
        """
        slots = self._match(tokens, adapter)
        if len(slots) <= more_than:
            return []
        for slot in slots:
            self._num_idle -= self._counts[slot] == 0
            self._counts[slot] += 1
        self._note_held()
        self.sharing.num_shares += 1
        self.sharing.num_shared_tokens += len(slots) - more_than
        return slots

    def remember(self, tokens: Sequence[int], slots: Sequence[int], adapter: str = "") -> None:
        """Let others share `slots`, which hold `tokens` from the first on.

        NOTE: they must be computed, committed and known to be free of NaN. Raises InvariantError if one is not held.
        """
        if self._cache is None or not slots:
            return
        self._checked(slots)
        added = self._cache.insert(list(tokens), list(slots), adapter)
        for slot in added:
            if self._is_cached[slot]:
                raise InvariantError(f"slot {slot} is cached under two sequences of tokens")
            self._is_cached[slot] = True
        self.version += bool(added)

    def check(self, referenced: Iterable[int]) -> None:
        """Raise InvariantError unless `referenced` (each holder's slots, with repeats) is exactly what is held, and
        free, held and cached slots are all slots."""
        expected = Counter(referenced)
        for slot in range(self.num_slots):
            if self._counts[slot] != expected[slot]:
                raise InvariantError(
                    f"slot {slot} is held {self._counts[slot]} times, referenced {expected[slot]} times"
                )
        in_cache = set() if self._cache is None else self._cache.check()
        if in_cache != {slot for slot, is_cached in enumerate(self._is_cached) if is_cached}:
            raise InvariantError("the prefix cache holds other slots than those that are marked as cached")
        in_use = {slot for slot, count in enumerate(self._counts) if count} | in_cache
        if len(set(self._free)) != len(self._free) or not in_use.isdisjoint(self._free):
            raise InvariantError("the free list names a slot twice, or one that is held or cached")
        num_idle = sum(self._counts[slot] == 0 for slot in in_cache)
        if num_idle != self._num_idle or len(self._free) + len(in_use) != self.num_slots - 1:
            raise InvariantError(
                f"{len(self._free)} free + {len(in_use)} held or cached ({self._num_idle} idle, in truth {num_idle}) "
                f"!= {self.num_slots - 1} slots"
            )

    def _match(self, tokens: Sequence[int], adapter: str) -> list[int]:
        return [] if self._cache is None else self._cache.match(list(tokens[:-1]), adapter)

    def _evict(self, count: int) -> None:
        """Turn `count` idle slots into ones that are nobody's."""
        assert self._cache is not None
        for slot in self._cache.evict(count, lambda slot: self._counts[slot] > 0):
            self._is_cached[slot] = False
            if self._counts[slot] == 0:
                self._num_idle -= 1
                self.sharing.num_evicted_slots += 1
                heapq.heappush(self._free, slot)

    def _note_held(self) -> None:
        self._most_held = max(self._most_held, self.num_held)

    def _limit_idle(self) -> None:
        limit = max(MIN_IDLE, IDLE_PER_HELD * self._most_held)
        if self._is_frugal and self._num_idle > limit:
            self._evict(self._num_idle - limit)

    def _checked(self, slots: Iterable[int]) -> Sequence[int]:
        slots = list(slots)
        for slot in slots:
            if not 0 < slot < self.num_slots or self._counts[slot] == 0:
                raise InvariantError(f"slot {slot} is not held by anyone")
        return slots


def create_pool(engine: EngineConfig, num_slots: int) -> SlotPool:
    """The pool of a worker that was configured like this."""
    cache = PrefixCache() if engine.has_prefix_cache else None
    return SlotPool(num_slots, cache, is_frugal=engine.device == "cpu")
