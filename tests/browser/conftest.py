"""A browser for each file of tests, and the services that other layers' tests make."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from browsing import launched
from playwright.async_api import Browser

sys.path.append(str(Path(__file__).parents[1] / "contract"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with launched() as opened:
        yield opened
