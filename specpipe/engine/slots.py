"""Who holds which KV slot: reference counts over slot ids.

Owns: the free list and the counts. Must not know: torch, sessions, what a slot holds.
Slot 0 is scratch for padding and is never handed out. A shared slot (a common prefix) is retained once by each holder
and becomes free when the last one releases it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from specpipe.errors import CapacityError, InvariantError


class SlotPool:
    """Hands out slots 1 .. num_slots - 1, lowest free ones first, so that a session's slots tend to be neighbours."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"num_slots must be at least 2 (slot 0 is scratch), got {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(1, num_slots))  # a heap; ascending is one
        self._counts = [0] * num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return `count` slots, each held once. Raises CapacityError, and takes none, when fewer are free."""
        if not self.can_allocate(count):
            raise CapacityError(f"{count} KV slots wanted, {self.num_free} of {self.num_slots - 1} are free")
        slots = [heapq.heappop(self._free) for _ in range(count)]
        for slot in slots:
            self._counts[slot] = 1
        return slots

    def retain(self, slots: Iterable[int]) -> None:
        """Hold each slot once more. Raises InvariantError, before any change, if one is not held by anyone."""
        slots = self._checked(slots)
        for slot in slots:
            self._counts[slot] += 1

    def release(self, slots: Iterable[int]) -> list[int]:
        """Give back one hold of each slot; return those that became free.

        Raises InvariantError, before any change, if a slot is released more often than it is held.
        """
        slots = self._checked(slots)
        for slot, count in Counter(slots).items():
            if count > self._counts[slot]:
                raise InvariantError(f"slot {slot} released {count} times but held {self._counts[slot]} times")
        freed = []
        for slot in slots:
            self._counts[slot] -= 1
            if self._counts[slot] == 0:
                heapq.heappush(self._free, slot)
                freed.append(slot)
        return freed

    def check(self, referenced: Iterable[int]) -> None:
        """Raise InvariantError unless `referenced` (each holder's slots, with repeats) is exactly what is held."""
        expected = Counter(referenced)
        for slot in range(self.num_slots):
            if self._counts[slot] != expected[slot]:
                raise InvariantError(
                    f"slot {slot} is held {self._counts[slot]} times, referenced {expected[slot]} times"
                )
        if len(set(self._free)) != len(self._free) or any(self._counts[slot] for slot in self._free):
            raise InvariantError("the free list names a slot twice or one that is held")
        num_held = sum(count > 0 for count in self._counts)
        if len(self._free) + num_held != self.num_slots - 1:
            raise InvariantError(f"{len(self._free)} free + {num_held} held != {self.num_slots - 1} slots")

    def _checked(self, slots: Iterable[int]) -> Sequence[int]:
        slots = list(slots)
        for slot in slots:
            if not 0 < slot < self.num_slots or self._counts[slot] == 0:
                raise InvariantError(f"slot {slot} is not held by anyone")
        return slots
