"""How long what has ended waits: specpipe.launcher.restarts."""

from __future__ import annotations

from specpipe.launcher.restarts import RestartDelays


def test_delays_double_up_to_half_a_minute() -> None:
    delays = RestartDelays()
    assert [delays.after(0.0) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]


def test_what_lived_for_a_while_waits_the_shortest_time_again() -> None:
    delays = RestartDelays(first_s=2, max_s=8, stable_after_s=10)
    assert [delays.after(lived_s) for lived_s in (0, 10, 0, 11, 0)] == [2, 4, 8, 2, 4]
