"""How many workers there should be, from what they and the coordinators have measured. Pure: the caller has the clock.

Owns: AutoscaleConfig and the decision. Must not know: where loads come from (`load`), how workers begin and leave
(`service`).

Draft workers: more while requests find none with room, or while they are busy and the target waits for what they draft
(exposed draft time) or begins rounds without it (hit rate): idle draft workers that guess badly are not mended by more
of them. Fewer when one less would still not be busy.
Target workers: more while requests wait for their turn longer than they may; fewer when none waits and one less would
have to commit no more tokens a second than workers have shown that they can.
A wish must last (`up_after_s`, `down_after_s`) and the last change must have settled (`settle_s`); thresholds for up
and down lie apart. One worker at a time.
What is not known is not taken for nothing to do: then nothing is wished for, and what was wished for begins anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

from specpipe.config import check_counts
from specpipe.errors import ConfigError

MAX_COUNT: Final = 1000  # of processes of a kind


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBounds:
    """When there should be more draft workers, and when fewer."""

    min: int = 1
    max: int = 4
    max_exposed_share: float = 0.3  # exposed of all draft time; above: the target waits too much
    min_hit_rate: float = 0.5  # rounds with something to verify; below: drafts come too late
    busy_share: float = 0.6  # of the time in which a step runs, averaged over workers; above: they are busy

    def __post_init__(self) -> None:
        _check_bounds(self.min, self.max)
        _check_shares(self, "max_exposed_share", "min_hit_rate", "busy_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetBounds:
    """When there should be more target workers, and when fewer."""

    min: int = 1
    max: int = 4
    max_queue_s: float = 0.5  # mean time that a request waits for its turn; above: too long
    spare_share: float = 0.7  # of the tokens/s that a worker has been seen to commit: so much the others may have to

    def __post_init__(self) -> None:
        check_counts(self, "min")
        _check_bounds(self.min, self.max)
        _check_shares(self, "spare_share")
        if not 0 < self.max_queue_s < math.inf:
            raise ConfigError(f"max_queue_s must be more than 0, got {self.max_queue_s:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """Of which workers the number is changed, and how eagerly. None of a kind: it stays as it is."""

    draft_workers: DraftBounds | None = None
    target_workers: TargetBounds | None = None
    every_s: float = 5.0  # how often loads are looked at
    up_after_s: float = 10.0  # so long must more be wanted
    down_after_s: float = 120.0  # so long must fewer be wanted
    settle_s: float = 30.0  # after a change, before the next one

    def __post_init__(self) -> None:
        for name in ("every_s", "up_after_s", "down_after_s", "settle_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name):g}")
        if self.every_s < 0.1:
            raise ConfigError(f"every_s must be at least 0.1, got {self.every_s:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What happened over the last while, all processes together. Shares and rates; None: nothing to tell it by.

    There is one only of a while of which all coordinators have told.
    """

    exposed_share: float | None = None  # of draft time
    hit_rate: float | None = None  # of rounds that count
    draft_busy_share: float | None = 0.0  # mean over draft workers; None: not all of them have told
    num_undrafted: int = 0  # running requests that want a draft worker and have none
    queue_s: float | None = None  # mean over requests whose turn came
    num_queued: int = 0  # requests that wait now
    tokens_per_s: float = 0.0  # committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one kind's decisions remember. Times are of the caller's clock, in seconds."""

    more_since_s: float | None = None  # since when more have been wanted without a break
    fewer_since_s: float | None = None
    changed_s: float = -math.inf  # when their number was changed last
    best_tokens_per_s: float = 0.0  # of one target worker, as long as there was work enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    count: int  # how many there should be now
    reason: str = ""  # empty: as many as there are
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a load alone asks for: -1, 0 or 1 workers more, and why."""

    step: int = 0
    reason: str = ""


def decide_drafts(
    bounds: DraftBounds, pace: AutoscaleConfig, memory: Memory, load: Load | None, *, count: int, now_s: float
) -> Decision:
    """The number of draft workers. `load` None: it is not known. `count`: how many there are, those that begin
    included."""
    wish = wish_for_drafts(bounds, load, count) if load is not None else Wish()
    return _decide(wish, bounds.min, bounds.max, pace, memory, count, now_s)


def decide_targets(
    bounds: TargetBounds, pace: AutoscaleConfig, memory: Memory, load: Load | None, *, count: int, now_s: float
) -> Decision:
    """The number of target workers. `load` None: it is not known. `count`: see `decide_drafts`."""
    if load is None:
        return _decide(Wish(), bounds.min, bounds.max, pace, memory, count, now_s)
    if _is_waiting(load) and count:  # they do what they can: that is what one can do
        memory = replace(memory, best_tokens_per_s=max(memory.best_tokens_per_s, load.tokens_per_s / count))
    wish = wish_for_targets(bounds, load, memory.best_tokens_per_s, count)
    return _decide(wish, bounds.min, bounds.max, pace, memory, count, now_s)


def wish_for_drafts(bounds: DraftBounds, load: Load, count: int) -> Wish:
    if load.num_undrafted:
        return Wish(step=1, reason=f"{load.num_undrafted} requests have no draft worker")
    if load.draft_busy_share is None:
        return Wish()
    is_waiting = load.exposed_share is not None and load.exposed_share > bounds.max_exposed_share
    is_missing = load.hit_rate is not None and load.hit_rate < bounds.min_hit_rate
    if (is_waiting or is_missing) and load.draft_busy_share > bounds.busy_share:
        said = f"{load.exposed_share:.0%} of draft time is exposed" if is_waiting else f"hit rate {load.hit_rate:.0%}"
        return Wish(step=1, reason=f"{said}, and draft workers are busy {load.draft_busy_share:.0%} of the time")
    if is_waiting or is_missing or count < 2:
        return Wish()
    busy_without_one = load.draft_busy_share * count / (count - 1)
    if busy_without_one < bounds.busy_share / 2:
        return Wish(step=-1, reason=f"{count - 1} would be busy {busy_without_one:.0%} of the time")
    return Wish()


def wish_for_targets(bounds: TargetBounds, load: Load, best_tokens_per_s: float, count: int) -> Wish:
    """`best_tokens_per_s`: of one worker; 0: not known yet, then only a service without work shrinks."""
    if load.queue_s is not None and load.queue_s > bounds.max_queue_s:
        return Wish(step=1, reason=f"requests wait {load.queue_s:.1f} s for their turn")
    if load.num_queued and load.queue_s is None:
        return Wish(step=1, reason=f"{load.num_queued} requests wait and none has had its turn")
    if _is_waiting(load) or count < 2:
        return Wish()
    needed = load.tokens_per_s / (count - 1)
    if needed <= bounds.spare_share * best_tokens_per_s:
        return Wish(step=-1, reason=f"{count - 1} would commit {needed:.0f} tokens/s each")
    return Wish()


def _is_waiting(load: Load) -> bool:
    return load.num_queued > 0


def _decide(
    wish: Wish, least: int, most: int, pace: AutoscaleConfig, memory: Memory, count: int, now_s: float
) -> Decision:
    """A number out of bounds is mended at once; any other change needs a wish that has lasted."""
    memory = _remember(memory, wish.step, now_s)
    if not least <= count <= most:
        count = min(max(count, least), most)
        return Decision(count=count, reason="the bounds say so", memory=_changed(memory, now_s))
    wanted = min(max(count + wish.step, least), most)
    since_s = memory.more_since_s if wish.step > 0 else memory.fewer_since_s
    patience_s = pace.up_after_s if wish.step > 0 else pace.down_after_s
    if wanted == count or since_s is None:
        return Decision(count=count, memory=memory)
    if now_s - since_s < patience_s or now_s - memory.changed_s < pace.settle_s:
        return Decision(count=count, memory=memory)
    return Decision(count=wanted, reason=wish.reason, memory=_changed(memory, now_s))


def _remember(memory: Memory, step: int, now_s: float) -> Memory:
    def since(earlier: float | None, *, is_wanted: bool) -> float | None:
        return (now_s if earlier is None else earlier) if is_wanted else None

    return replace(
        memory,
        more_since_s=since(memory.more_since_s, is_wanted=step > 0),
        fewer_since_s=since(memory.fewer_since_s, is_wanted=step < 0),
    )


def _changed(memory: Memory, now_s: float) -> Memory:
    return replace(memory, changed_s=now_s, more_since_s=None, fewer_since_s=None)


def _check_bounds(least: int, most: int) -> None:
    if not 0 <= least <= most:
        raise ConfigError(f"min must be from 0 to max, got {least} and {most}")
    if most > MAX_COUNT:
        raise ConfigError(f"max must be at most {MAX_COUNT}, got {most}")


def _check_shares(config: DraftBounds | TargetBounds, *names: str) -> None:
    for name in names:
        if not 0 < getattr(config, name) <= 1:
            raise ConfigError(f"{name} must be more than 0 and at most 1, got {getattr(config, name):g}")
