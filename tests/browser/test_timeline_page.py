"""The page of a trace as people use it: by keyboard and pointer, in Debian's Chromium, from a file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from browsing import CHROMIUM, launched
from playwright.async_api import Browser, Page
from timeline_traces import four_rounds, long_trace

from specpipe.spans import KeptTrace
from specpipe.timeline import page as timeline_page
from specpipe.timeline.layout import lay_out

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)"),
    pytest.mark.timeout(180),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with launched() as opened:
        yield opened


@asynccontextmanager
async def reading(browser: Browser, trace: KeptTrace, folder: Path, **options: Any) -> AsyncIterator[Page]:
    """The page of a trace, opened from a file. Whatever the browser complained of fails the test at the end."""
    path = folder / "trace.html"
    path.write_text(timeline_page.render(lay_out(trace)), encoding="utf-8")
    context = await browser.new_context(viewport={"width": 1280, "height": 860}, **options)
    try:
        page = await context.new_page()
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto(path.as_uri())
        yield page
        assert problems == []
    finally:
        await context.close()


async def scale_of(page: Page) -> float:
    return float(await page.evaluate("document.querySelector('.plot').dataset.scale"))


async def test_arrow_keys_go_from_round_to_round_and_say_what_each_was(browser: Browser, tmp_path: Path) -> None:
    async with reading(browser, four_rounds(), tmp_path) as page:
        said = []
        for _ in range(4):
            await page.keyboard.press("ArrowRight")
            said.append((await page.inner_text("output")).splitlines()[0])
        assert [line.partition(":")[0] for line in said] == ["round 1", "round 2", "round 3", "round 4"]
        assert said[1] == "round 2: hit, 3 of 4 verified nodes accepted"


async def test_a_round_pointed_at_is_joined_with_the_draft_steps_it_verified(browser: Browser, tmp_path: Path) -> None:
    async with reading(browser, four_rounds(), tmp_path) as page:
        await page.hover(".bar[data-round='2']")
        assert await page.locator(".links path").count() == 1
        assert await page.locator(".bar.accepted.linked").count() == 1
        await page.hover(".bar.rejected")  # and the other way round
        assert await page.locator(".bar[data-round='4'].linked").count() == 1


async def test_a_long_answer_is_zoomed_and_any_round_of_it_found(browser: Browser, tmp_path: Path) -> None:
    async with reading(browser, long_trace(500), tmp_path) as page:
        first = await scale_of(page)
        await page.click("#whole")
        whole = await scale_of(page)
        assert whole < first / 10
        await page.focus(".scroll")
        await page.keyboard.press("+")
        assert await scale_of(page) > whole
        await page.click("#rounds")
        assert await scale_of(page) == pytest.approx(first)
        await page.click("summary")
        await page.click("td a[data-round='400']")
        assert (await page.inner_text("output")).startswith("round 400: ")
        box, view = await page.locator(".bar.chosen").bounding_box(), await page.locator(".scroll").bounding_box()
        assert box is not None
        assert view is not None
        assert view["x"] <= box["x"] <= view["x"] + view["width"]


async def test_without_script_every_bar_is_there_with_what_it_has_to_say(browser: Browser, tmp_path: Path) -> None:
    async with reading(browser, four_rounds(), tmp_path, java_script_enabled=False) as page:
        title = await page.locator(".bar[data-round='2']").get_attribute("title")
        assert title is not None
        assert title.startswith("round 2: hit")
        assert await page.locator(".tools").is_hidden()


async def test_it_is_dark_where_that_is_wanted(browser: Browser, tmp_path: Path) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        async with reading(browser, four_rounds(), tmp_path, color_scheme=scheme) as page:
            grounds.add(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2
