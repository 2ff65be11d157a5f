"""Computed prefixes are found by their tokens, shared by counting, and given up in the order of last use."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specpipe.config import EngineConfig
from specpipe.engine import slots as slots_module
from specpipe.engine.prefix_cache import PrefixCache
from specpipe.engine.slots import SlotPool, create_pool
from specpipe.errors import InvariantError


def never_held(_: int) -> bool:
    return False


def remembered(pool: SlotPool, tokens: list[int], adapter: str = "") -> list[int]:
    """Slots of a session that computed `tokens`, was remembered, and ended."""
    shared = pool.share(tokens, adapter)
    slots = shared + pool.allocate(len(tokens) - len(shared))
    pool.remember(tokens, slots, adapter)
    pool.release(slots)
    pool.check([])
    return slots


# The tree


def test_the_longest_prefix_is_found_to_the_token() -> None:
    cache = PrefixCache()
    assert cache.insert([1, 2, 3, 4], [11, 12, 13, 14]) == [11, 12, 13, 14]
    assert cache.insert([1, 2, 5], [21, 22, 23]) == [23]
    assert cache.match([1, 2, 3, 4, 9]) == [11, 12, 13, 14]
    assert cache.match([1, 2, 5, 3]) == [11, 12, 23]
    assert cache.match([1, 2]) == [11, 12]
    assert cache.match([1, 7]) == [11]
    assert cache.match([2]) == cache.match([]) == []
    assert cache.check() == {11, 12, 13, 14, 23}


def test_adapters_are_apart() -> None:
    cache = PrefixCache()
    cache.insert([1, 2], [11, 12], "one")
    cache.insert([1, 2], [21, 22], "two")
    assert cache.match([1, 2, 3]) == []
    assert cache.match([1, 2, 3], "one") == [11, 12]
    assert cache.match([1, 2, 3], "two") == [21, 22]
    assert sorted(cache.evict(4, never_held)) == [11, 12, 21, 22]
    assert cache.match([1, 2], "one") == []
    assert cache.check() == set()


def test_the_end_of_the_path_used_longest_ago_goes_first() -> None:
    cache = PrefixCache()
    cache.insert([1, 2, 3], [11, 12, 13])
    cache.insert([1, 2, 4], [21, 22, 24])
    cache.insert([5, 6], [15, 16])
    cache.match([1, 2, 3])
    order = [cache.evict(1, never_held) for _ in range(6)]
    assert order == [[24], [16], [15], [13], [12], [11]]
    assert cache.num_slots == 0


def test_what_is_held_stays_while_there_is_anything_else() -> None:
    cache = PrefixCache()
    cache.insert([1, 2, 3], [11, 12, 13])
    cache.insert([4, 5], [14, 15])
    assert sorted(cache.evict(3, lambda slot: slot in (11, 12))) == [13, 14, 15]
    assert cache.match([1, 2, 3]) == [11, 12]
    assert cache.evict(1, lambda slot: slot == 12) == [11, 12], "11 is held by nobody and leads to 12"
    assert cache.check() == set()


# The pool


def test_one_token_is_always_left_to_compute() -> None:
    pool = SlotPool(20, PrefixCache())
    slots = remembered(pool, [1, 2, 3])
    assert pool.share([1, 2, 3]) == slots[:2]
    assert pool.share([1]) == []


def test_a_remembered_slot_counts_as_free_and_is_taken_when_others_run_out() -> None:
    pool = SlotPool(9, PrefixCache())
    remembered(pool, [1, 2, 3, 4, 5])
    assert pool.num_free == 8
    taken = pool.allocate(6)
    assert pool.num_free == 2
    assert pool.sharing.num_evicted_slots == 5, "a few more than needed: whoever grows by one slot a step comes again"
    pool.check(taken)


def test_a_shared_slot_is_neither_free_nor_evicted() -> None:
    pool = SlotPool(9, PrefixCache())
    slots = remembered(pool, [1, 2, 3, 4])
    assert pool.num_wanted([1, 2, 3, 4, 5, 6]) == 6
    shared = pool.share([1, 2, 3, 4, 5, 6])
    assert shared == slots
    assert pool.num_wanted([1, 2, 3, 4, 5, 6]) == 2
    assert pool.num_free == 4
    assert set(pool.allocate(4)).isdisjoint(shared)
    assert pool.num_free == 0


def test_of_two_that_computed_the_same_the_first_is_kept() -> None:
    pool = SlotPool(20, PrefixCache())
    one, two = pool.allocate(3), pool.allocate(4)
    pool.remember([1, 2, 3], one)
    pool.remember([1, 2, 3, 4], two)
    pool.check([*one, *two])
    assert pool.share([1, 2, 3, 4, 5]) == [*one, two[3]]
    assert pool.release(two) == two[:3]
    pool.check([*one, *one, two[3]])


def test_release_names_what_nobody_vouches_for() -> None:
    pool = SlotPool(20, PrefixCache())
    slots = pool.allocate(5)
    pool.remember([1, 2, 3], slots[:3])
    assert pool.release(slots) == slots[3:]


def test_only_a_longer_prefix_than_one_has_is_shared() -> None:
    pool = SlotPool(20, PrefixCache())
    slots = remembered(pool, [1, 2, 3, 4])
    assert pool.share([1, 2, 3, 4, 5], more_than=4) == []
    assert pool.num_free == 19
    assert pool.share([1, 2, 3, 4, 5], more_than=3) == slots
    assert (pool.sharing.num_shares, pool.sharing.num_shared_tokens) == (1, 1)


def test_a_slot_that_is_not_held_cannot_be_remembered() -> None:
    pool = SlotPool(20, PrefixCache())
    slots = pool.allocate(2)
    with pytest.raises(InvariantError, match="not held"):
        pool.remember([1, 2, 3], [*slots, 7])
    pool.remember([1, 2], slots)
    with pytest.raises(InvariantError, match="two sequences"):
        pool.remember([3, 4], slots)


def test_without_a_cache_nothing_is_shared() -> None:
    engine = EngineConfig(model="m", has_prefix_cache=False)
    pool = create_pool(engine, 20)
    remembered(pool, [1, 2, 3])
    assert pool.share([1, 2, 3, 4]) == []
    assert pool.num_wanted([1, 2, 3, 4]) == 4


def test_on_a_cpu_what_is_cached_stays_in_proportion_to_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is taken when a slot is first used: slots used so far must stop growing in a service that does not."""
    monkeypatch.setattr(slots_module, "MIN_IDLE", 30)
    pool = create_pool(EngineConfig(model="m"), 1200)
    used = {slot for number in range(200) for slot in remembered(pool, [number] * 5)}
    assert max(used) <= 30 + 5
    big = remembered(pool, [999] * 100)
    used = {slot for number in range(1000, 1200) for slot in remembered(pool, [number] * 5)}
    assert max([*used, *big]) <= 200 + 100
    roomy = SlotPool(1200, PrefixCache())
    assert max(slot for number in range(200) for slot in remembered(roomy, [number] * 5)) == 1000


# Any order of events


@dataclass
class Holder:
    adapter: str
    tokens: list[int]
    slots: list[int]
    written: int = 0  # slots[:written] hold what they must


@dataclass
class Content:
    """What a slot was last written with: the whole prefix that ends in it."""

    adapter: str
    prefix: tuple[int, ...]


class SharedPool(RuleBasedStateMachine):
    """Sessions with few different tokens come, compute, are remembered, grow, and go, in slots that hardly suffice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(24, PrefixCache(), is_frugal=True)
        self.holders: list[Holder] = []
        self.contents: dict[int, Content] = {}

    def write(self, holder: Holder) -> None:
        for i in range(holder.written, len(holder.slots)):
            self.contents[holder.slots[i]] = Content(holder.adapter, tuple(holder.tokens[: i + 1]))
        holder.written = len(holder.slots)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12), adapter=st.sampled_from(["", "a"]))
    def open(self, tokens: list[int], adapter: str) -> None:
        wanted = self.pool.num_wanted(tokens, adapter)
        free = self.pool.num_free
        if not self.pool.can_allocate(wanted):
            return
        shared = self.pool.share(tokens, adapter)
        assert len(shared) < len(tokens)
        for i, slot in enumerate(shared):
            assert self.contents[slot] == Content(adapter, tuple(tokens[: i + 1]))
        own = self.pool.allocate(len(tokens) - len(shared))
        assert self.pool.num_free == free - wanted
        held = {slot for holder in self.holders for slot in holder.slots}
        assert held.isdisjoint(own)
        self.holders.append(Holder(adapter, tokens, [*shared, *own], written=len(shared)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def compute_and_remember(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.write(holder)
        self.pool.remember(holder.tokens, holder.slots, holder.adapter)

    @precondition(lambda self: self.holders and self.pool.num_free)
    @rule(data=st.data(), token=st.integers(0, 2))
    def grow(self, data: st.DataObject, token: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        holder.slots += self.pool.allocate(1)
        holder.tokens = [*holder.tokens, token]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share_more(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        shared = self.pool.share(holder.tokens, holder.adapter, more_than=holder.written)
        if shared:
            self.pool.release(holder.slots[: len(shared)])
            holder.slots[: len(shared)] = shared
            holder.written = len(shared)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        freed = self.pool.release(holder.slots)
        held = {slot for other in self.holders for slot in other.slots}
        assert held.isdisjoint(freed)
        for slot in freed:
            self.contents.pop(slot, None)

    @invariant()
    def is_whole(self) -> None:
        self.pool.check(slot for holder in self.holders for slot in holder.slots)
        for holder in self.holders:
            for i in range(holder.written):
                assert self.contents[holder.slots[i]] == Content(holder.adapter, tuple(holder.tokens[: i + 1]))


TestSharedPool = SharedPool.TestCase
TestSharedPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
