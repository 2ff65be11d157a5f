"""Memory by control groups: the least limit around a process counts, in both versions, and pages of files are free."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpipe.engine.memory import Memory, free_memory, total_memory

MIB = 1 << 20
NODE = 1000 * MIB


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def told(root: Path) -> tuple[Memory, Memory]:
    """In all and free on a machine that has 1000 MiB and 900 free; limits are told by their path below `root`."""
    both = total_memory(root, NODE), free_memory(root, 900 * MIB)
    total, free = (Memory(memory.num_bytes, memory.limit.removeprefix(f"{root}/")) for memory in both)
    return total, free


def test_without_control_groups_the_machine_bounds(tmp_path: Path) -> None:
    assert told(tmp_path) == (Memory(NODE), Memory(900 * MIB))
    assert told(write(tmp_path, {"proc/self/cgroup": "0::/"})) == (Memory(NODE), Memory(900 * MIB))


def test_a_container_of_version_2_is_bounded_by_its_own_limit(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 400 * MIB,
            "sys/fs/cgroup/memory.current": 300 * MIB,
            "sys/fs/cgroup/memory.stat": f"anon {200 * MIB}\ninactive_file {80 * MIB}\nactive_file {20 * MIB}",
        },
    )
    limit = "sys/fs/cgroup/memory.max"
    assert told(tmp_path) == (Memory(400 * MIB, limit), Memory(180 * MIB, limit))


@pytest.mark.parametrize(("outer", "inner"), [(300, 500), (500, 300)])
def test_the_least_limit_of_nested_groups_counts(tmp_path: Path, outer: int, inner: int) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container/worker",
            "sys/fs/cgroup/pod/memory.max": outer * MIB,
            "sys/fs/cgroup/pod/memory.current": 100 * MIB,
            "sys/fs/cgroup/pod/container/memory.max": inner * MIB,
            "sys/fs/cgroup/pod/container/memory.current": 50 * MIB,
            "sys/fs/cgroup/pod/container/worker/memory.max": "max",
        },
    )
    group, used = ("pod", 100) if outer < inner else ("pod/container", 50)
    limit = f"sys/fs/cgroup/{group}/memory.max"
    assert told(tmp_path) == (Memory(300 * MIB, limit), Memory((300 - used) * MIB, limit))


def test_what_neighbours_use_of_an_outer_group_is_not_free(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container",
            "sys/fs/cgroup/pod/memory.max": 600 * MIB,
            "sys/fs/cgroup/pod/memory.current": 590 * MIB,
            "sys/fs/cgroup/pod/container/memory.max": 500 * MIB,
            "sys/fs/cgroup/pod/container/memory.current": 100 * MIB,
        },
    )
    total, free = told(tmp_path)
    assert total == Memory(500 * MIB, "sys/fs/cgroup/pod/container/memory.max")
    assert free == Memory(10 * MIB, "sys/fs/cgroup/pod/memory.max")


@pytest.mark.parametrize("path", ["/kubepods/pod7", "/", "/../sibling"])
def test_a_container_of_version_1_may_see_its_own_group_at_the_top(tmp_path: Path, path: str) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": f"9:name=systemd:/\n5:cpu,cpuacct:/x\n4:memory:{path}\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 400 * MIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 100 * MIB,
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file {MIB}\ntotal_inactive_file {40 * MIB}",
        },
    )
    limit = "sys/fs/cgroup/memory/memory.limit_in_bytes"
    assert told(tmp_path) == (Memory(400 * MIB, limit), Memory(340 * MIB, limit))


@pytest.mark.parametrize("limit", ["max", 9223372036854771712, 2 * NODE])
def test_limits_that_the_machine_does_not_reach_are_none(tmp_path: Path, limit: object) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a\n0::/a",
            "sys/fs/cgroup/a/memory.max": limit,
            "sys/fs/cgroup/a/memory.current": 5 * MIB,
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": 5 * MIB,
        },
    )
    assert told(tmp_path) == (Memory(NODE), Memory(900 * MIB))


def test_a_group_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": MIB, "sys/fs/cgroup/memory.current": 2 * MIB}
    assert told(write(tmp_path, files))[1].num_bytes == 0


def test_this_process_has_memory_and_no_more_free_than_in_all() -> None:
    assert 0 < free_memory().num_bytes <= total_memory().num_bytes


def test_an_error_names_the_limit() -> None:
    assert Memory(3 * MIB).told("memory") == "3 MiB of memory"
    limited = Memory(7 * MIB, "/sys/fs/cgroup/memory.max").shared_by(2)
    assert limited.told("free memory") == "3 MiB of free memory (limited by /sys/fs/cgroup/memory.max)"
