"""One `up` alone has a name on a machine, and those that look for it hear the truth, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from running import environment

from specpipe.cluster.local_place import LocalPlace, LocalRay, tell
from specpipe.errors import ConfigError, WorkerUnavailableError

HOLD = """
import sys, time
from specpipe.cluster.local_place import LocalPlace, LocalRay, tell
with LocalPlace("test").held() as file:
    tell(file, LocalRay(address="127.0.0.1:1", auth_mode="token"))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_name_is_had_once_until_the_block_ends() -> None:
    for _ in range(2):
        with LocalPlace("test").held():
            with pytest.raises(ConfigError, match="test is up already"), LocalPlace("test").held():
                raise AssertionError("it was had twice")
            with LocalPlace("other").held():
                assert LocalPlace("other").is_held()


def test_what_is_told_is_found_and_before_that_it_is_starting() -> None:
    place = LocalPlace("test")
    with pytest.raises(WorkerUnavailableError, match="test is not up on this machine"):
        place.find()
    local = LocalRay(address="127.0.0.1:1", auth_mode="token")
    with place.held() as file:
        with pytest.raises(WorkerUnavailableError, match="test is starting"):
            place.find()
        tell(file, local)
        assert place.find() == local
        assert not place.wait_free(0.0)
    assert place.wait_free(0.0)
    with pytest.raises(WorkerUnavailableError, match="test is not up on this machine"):
        place.find()


def test_a_name_is_free_again_when_its_process_is_killed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert LocalPlace("test").find().address == "127.0.0.1:1"
        process.kill()
    assert not LocalPlace("test").is_held()
    with LocalPlace("test").held() as file:
        file.seek(0)
        assert file.read() == "", "what the last one has told is forgotten"
