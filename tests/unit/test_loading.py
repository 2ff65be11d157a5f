"""Python's looks for unused cycles rest while a process loads, and only then."""

from __future__ import annotations

import gc

import pytest

from specpipe.process import loading


def test_the_looks_rest_while_loading_and_go_on_afterwards() -> None:
    with loading():
        assert not gc.isenabled()
        with loading():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_they_go_on_after_a_load_that_failed() -> None:
    with pytest.raises(OSError, match="no weights"), loading():
        raise OSError("no weights")
    assert gc.isenabled()


def test_whoever_turned_them_off_finds_them_off() -> None:
    gc.disable()
    try:
        with loading():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
