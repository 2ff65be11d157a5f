"""SlotPool: free + held slots are all slots, whatever is allocated, shared and released."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specpipe.engine.slots import SlotPool
from specpipe.errors import CapacityError, InvariantError


def test_slot_zero_is_never_handed_out() -> None:
    pool = SlotPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_a_refused_allocation_takes_nothing() -> None:
    pool = SlotPool(5)
    pool.allocate(2)
    with pytest.raises(CapacityError):
        pool.allocate(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("slots", [[0], [3], [7], [-1], [1, 1]])
def test_releasing_what_is_not_held_changes_nothing(slots: list[int]) -> None:
    pool = SlotPool(4)
    held = pool.allocate(2)
    with pytest.raises(InvariantError):
        pool.release(slots)
    pool.check(held)


def test_check_names_a_leak() -> None:
    pool = SlotPool(4)
    pool.allocate(1)
    with pytest.raises(InvariantError, match="slot 1 is held 1 times, referenced 0 times"):
        pool.check([])


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(12)
        self.held: Counter[int] = Counter()

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        if not self.pool.can_allocate(count):
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            return
        slots = self.pool.allocate(count)
        assert len(set(slots)) == count
        assert not any(self.held[slot] for slot in slots)
        self.held.update(slots)

    @precondition(lambda self: +self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.held.elements())), max_size=6))
        if any(count > self.held[slot] for slot, count in Counter(slots).items()):
            with pytest.raises(InvariantError):
                self.pool.release(slots)
            return
        freed = self.pool.release(slots)
        self.held.subtract(slots)
        assert all(self.held[slot] == 0 for slot in freed)

    @invariant()
    def is_whole(self) -> None:
        self.pool.check(self.held.elements())


TestPool = Pool.TestCase
