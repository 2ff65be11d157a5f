"""What Ray itself raises is told in our words, and a start that fails is told at once. specpipe.cluster.on_ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

import pytest

from specpipe.cluster.backend import GroupLostError
from specpipe.cluster.reading import fill_cluster

pytest.importorskip("ray", reason="Ray is not installed")

from ray.exceptions import RaySystemError

from specpipe.cluster import on_ray

CONFIG = fill_cluster({"name": "demo"}, "cluster.yaml")


def _refuse(*_: object) -> NoReturn:
    raise RaySystemError("nobody there")


def _nothing(*_: object) -> list[str]:
    return []


async def test_a_list_that_ray_does_not_give_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray.ray.util, "list_named_actors", _refuse)
    with pytest.raises(GroupLostError, match="nobody there"):
        await on_ray.RayBackend(CONFIG).names()


@pytest.mark.parametrize("answers", [[_refuse], [_nothing, _refuse]])
async def test_a_group_that_ray_does_not_take_back_is_a_loss(
    answers: list[Callable[..., list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it at once, or while it is waited for that its name is forgotten."""
    left = iter(answers)
    monkeypatch.setattr(on_ray.ray.util, "list_named_actors", lambda: next(left)())
    monkeypatch.setattr(on_ray, "_placement_named", lambda name: None)
    with pytest.raises(GroupLostError, match="nobody there"):
        await on_ray.RayBackend(CONFIG).release("draft-worker-0")


async def test_a_start_of_which_nobody_asks_says_that_it_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(on_ray.ray.util, "list_named_actors", _refuse)
    monkeypatch.setattr(on_ray, "configure_logging", lambda level: None)
    controller = on_ray.Controller(CONFIG)
    await asyncio.wait([controller._started])
    await asyncio.sleep(0)  # until those have been called who wait for it
    assert "the service has not started: " in caplog.text
    assert "nobody there" in caplog.text
