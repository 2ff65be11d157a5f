"""How soon `specpipe up` on a local Ray answers, the demo pair, Ray itself included."""

from __future__ import annotations

import time

import pytest
from findings import record
from local_ray import NEEDS_RAY, local_cluster, short_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), *NEEDS_RAY]

MOST_S = 60.0  # as was asked for; a quiet machine of two cores takes a third


def test_a_local_ray_and_the_service_answer_within_a_minute() -> None:
    with short_folder() as folder:
        began_s = time.monotonic()
        with local_cluster(folder, "name: quick\ngrace_s: 2\n") as cluster:
            cluster.answer()
            answered_s = time.monotonic() - began_s
            ready_s = cluster.ready_s
    record(f"ready after {ready_s:.1f} s, first answer complete after {answered_s:.1f} s")
    assert answered_s < MOST_S
