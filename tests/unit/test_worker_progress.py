"""What a heartbeat tells of a worker's loop that hangs: whatever it hangs in counts, and waiting for work does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from draft_harness import Harness, open_message
from target_simulator import Clock, Simulator, create_open

from draft_worker import worker as draft_worker
from draft_worker.session import DraftSession
from specpipe.model_thread import StepLoop
from specpipe.testing import TableModel
from target_worker.planner import Planner
from target_worker.session import Session

HANG_S = 40.0


class Hanging:
    """Functions that take HANG_S more than they did, and what the loop's heartbeat says just before they return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loop: StepLoop, clock: Clock) -> None:
        self.running_s: list[float] = []
        self._monkeypatch = monkeypatch
        self._loop = loop
        self._clock = clock

    def hang_in(self, place: Any, name: str) -> None:
        original = getattr(place, name)

        def hanging(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._clock.now += HANG_S
            self.running_s.append(self._loop.heartbeat().step_running_ms / 1e3)
            return result

        self._monkeypatch.setattr(place, name, hanging)


def target() -> tuple[StepLoop, Clock, dict[str, tuple[Any, str]]]:
    sim = Simulator(TableModel(vocab_size=24, num_slots=512, seed=3), base_ms=0.0)
    sim.open(create_open(1, max_tokens=4))
    loop = sim.loop
    places = {
        "deadlines": (loop, "_expire"),
        "planning": (Planner, "plan"),
        "the pass": (sim.model, "forward"),
        "the verdict": (Session, "verify"),
    }
    return loop, sim.clock, places


def draft() -> tuple[StepLoop, Clock, dict[str, tuple[Any, str]]]:
    harness = Harness(TableModel(seed=14))
    harness.receive(open_message())
    clock = Clock()
    loop = harness.loop
    loop._clock = clock
    places = {
        "planning": (draft_worker, "plan_step"),
        "the pass": (harness.model, "forward"),
        "growing trees": (DraftSession, "expand"),
        "sending": (DraftSession, "take_extension"),
    }
    return loop, clock, places


Create = Callable[[], tuple[StepLoop, Clock, dict[str, tuple[Any, str]]]]
PLACES: Sequence[tuple[Create, str]] = [(create, place) for create in (target, draft) for place in create()[2]]


@pytest.mark.parametrize(("create", "place"), PLACES, ids=[f"{create.__name__}: {place}" for create, place in PLACES])
def test_whatever_a_step_hangs_in_shows(monkeypatch: pytest.MonkeyPatch, create: Create, place: str) -> None:
    loop, clock, places = create()
    hanging = Hanging(monkeypatch, loop, clock)
    hanging.hang_in(*places[place])
    loop.run_once()
    assert hanging.running_s[0] == pytest.approx(HANG_S)
    assert loop.heartbeat().step_running_ms == 0.0


@pytest.mark.parametrize("create", [target, draft])
def test_a_long_pass_is_not_longer_for_what_comes_before_and_after_it(
    monkeypatch: pytest.MonkeyPatch, create: Create
) -> None:
    loop, clock, places = create()
    hanging = Hanging(monkeypatch, loop, clock)
    for name in ("planning", "the pass", list(places)[-1]):
        hanging.hang_in(*places[name])
    loop.run_once()
    assert hanging.running_s == pytest.approx([HANG_S] * 3)


@pytest.mark.parametrize("create", [target, draft])
def test_waiting_for_work_is_no_hanging(create: Create) -> None:
    loop, clock, _ = create()
    while loop.run_once() == 0.0:
        pass
    clock.now += HANG_S
    assert loop.heartbeat().step_running_ms == 0.0
