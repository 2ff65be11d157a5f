"""What workers say that they hold: sessions by state, slots, nodes. Nothing when they are idle."""

from __future__ import annotations

from draft_harness import Harness, close_message, commit_message, open_message
from target_simulator import LINK, Simulator, create_open

from specpipe.telemetry.observer import WorkerLoad
from specpipe.testing import TableModel
from specpipe.types import Close, Extension, FinishReason


def slots_of(load: WorkerLoad) -> int:
    return load.num_used_slots + load.num_cached_slots + load.num_free_slots


def test_a_target_tells_running_queued_paused_and_finished_sessions_apart() -> None:
    world = Simulator(TableModel(num_slots=64), auto_close=False)
    assert world.loop.load() == WorkerLoad(num_free_slots=63)
    for session in (1, 2, 3):
        world.open(create_open(session, prompt=[session] * 20, max_tokens=30))
    assert world.loop.load().num_queued == 3
    world.loop.run_once()
    load = world.loop.load()
    assert (load.num_running, load.num_queued) == (1, 2), "with a margin, two do not fit"
    assert load.num_used_slots >= 20
    world.loop.link_paused(LINK, True)
    assert world.loop.load().num_paused == 3
    world.loop.link_paused(LINK, False)
    world.run()
    load = world.loop.load()
    assert (load.num_running, load.num_queued, load.num_finished) == (0, 0, 3)
    for session in (1, 2, 3):
        world.loop.receive(LINK, Close(session=session))
    load = world.loop.load()
    assert (load.num_finished, load.num_used_slots, load.num_tree_nodes) == (0, 0, 0)
    assert load.num_cached_slots > 0, "what was computed may be of use to the next one"
    assert slots_of(load) == 63
    assert load.num_evicted_slots > 0, "each took the place of the one before"


def test_a_target_counts_the_nodes_of_its_trees() -> None:
    world = Simulator(TableModel(), auto_close=False)
    world.open(create_open(1, max_tokens=8))
    hint = Extension(session=1, base=3, parents=(0, 1, 0), tokens=(4, 5, 6), confidences=(0.5,) * 3)
    world.loop.receive(LINK, hint)
    assert world.loop.load().num_tree_nodes == 3


def test_a_draft_worker_tells_its_sessions_slots_and_nodes() -> None:
    world = Harness(TableModel(num_slots=256))
    assert world.loop.load() == WorkerLoad(num_free_slots=255)
    world.receive(open_message(1))
    world.run()
    load = world.loop.load()
    assert (load.num_running, load.num_paused) == (1, 0)
    assert load.num_tree_nodes > 0
    assert load.num_used_slots >= 3
    world.loop.link_paused(1, True)
    assert world.loop.load().num_paused == 1
    world.loop.link_paused(1, False)
    world.receive(commit_message(1, 3, [5], finish=FinishReason.STOP))
    assert world.loop.load().num_finished == 1
    world.receive(close_message(1))
    load = world.loop.load()
    assert (load.num_running, load.num_finished, load.num_used_slots, load.num_tree_nodes) == (0, 0, 0, 0)
    assert slots_of(load) == 255
