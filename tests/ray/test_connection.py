"""Being connected to a Ray that does not answer or refuses: one sentence, and nobody waits for ever."""

from __future__ import annotations

import os
import tempfile

import pytest
from high_descriptors import many_descriptors, moved_high

from specpipe.cluster import connection
from specpipe.cluster.head import _has_ended
from specpipe.cluster.reading import fill_cluster
from specpipe.errors import WorkerUnavailableError


def test_a_local_ray_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "START_TIMEOUT_S", 0.01)
    ready_fd, said_fd = os.pipe()
    with (
        os.fdopen(ready_fd) as ready,
        os.fdopen(said_fd, "w"),
        tempfile.TemporaryFile() as log,
        pytest.raises(WorkerUnavailableError, match="a local Ray did not start in"),
    ):
        connection._heard(ready, log)


def test_a_local_ray_that_says_where_it_is_is_heard() -> None:
    ready_fd, said_fd = os.pipe()
    with os.fdopen(ready_fd) as ready, tempfile.TemporaryFile() as log:
        os.write(said_fd, b"127.0.0.1:6379 token\n")
        os.close(said_fd)
        local = connection._heard(ready, log)
    assert (local.address, local.auth_mode) == ("127.0.0.1:6379", "token")


def test_what_ray_itself_raises_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def refuse(**_: object) -> None:
        raise ray.exceptions.AuthenticationError("there is no token\nhere")

    monkeypatch.setattr(ray, "init", refuse)
    config = fill_cluster({"ray": {"address": "127.0.0.1:6379"}}, "cluster.yaml")
    with (
        pytest.raises(WorkerUnavailableError, match=r"^Ray at 127\.0\.0\.1:6379: there is no token here"),
        connection.existing_ray(config),
    ):
        pass


def test_the_end_of_whoever_began_a_local_ray_is_seen_on_any_descriptor() -> None:
    with many_descriptors():
        low_fd, life_fd = os.pipe()
        parent_fd = moved_high(low_fd)
        os.write(life_fd, b"x")
        assert not _has_ended(parent_fd)
        os.close(life_fd)
        assert _has_ended(parent_fd)
        os.close(parent_fd)
