"""The live page as people see and use it: Debian's Chromium on a real service of the demo pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, Visit, visiting
from playwright.async_api import Browser
from running import RunningService, running_service

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)"),
    pytest.mark.timeout(180),
]

ORIGINS = ("accepted", "recovered", "bonus", "plain")
WIDE, NARROW = {"width": 1600, "height": 1000}, {"width": 380, "height": 800}


@pytest.fixture(scope="module")
def service(log_folder: Path) -> Iterator[RunningService]:
    with running_service(log_folder / "live-page.log") as running:
        yield running


@pytest.fixture
def address(service: RunningService) -> str:
    assert service.http is not None
    return service.http


# What it shows


async def test_an_answer_streams_with_each_token_in_the_dress_of_its_origin(browser: Browser, address: str) -> None:
    async with visiting(browser, address) as visit:
        await visit.ask(tokens=80, seed="7")
        await visit.shows(".progress", "tokens in")
        assert await visit.page.locator(".statistics").count() == 0  # it is still answered
        await visit.finish()
        counts = {origin: await visit.count(origin) for origin in ORIGINS}
        assert sum(counts.values()) == 80
        assert counts["accepted"] > 10
        told = [await item.inner_text() for item in await visit.page.locator(".origins .number").all()]
        assert told == [str(counts[origin]) for origin in ORIGINS]
        styles = {origin: await style_of(visit, origin) for origin in ORIGINS if counts[origin]}
        assert len(set(styles.values())) == len(styles)
        statistics = await visit.page.inner_text(".statistics")
        assert "80 tokens in" in statistics
        assert "(length)" in statistics
        assert f"{counts['accepted']} of 80" in statistics
        await visit.page.click("summary")
        assert "Target steps for this answer" in await visit.page.inner_text(".meanings")


async def style_of(visit: Visit, origin: str) -> tuple[str, str, str]:
    """Colour, and what tells it apart without colours."""
    return tuple(
        await visit.page.eval_on_selector(
            f".text .token.{origin}",
            "e => (s => [s.color, `${s.textDecorationLine} ${s.textDecorationStyle}`, s.backgroundColor])"
            "(getComputedStyle(e))",
        )
    )


async def test_origins_are_told_apart_without_colours(browser: Browser, address: str) -> None:
    """Two have lines of their own; of the others one has a ground, and one has nothing."""
    async with visiting(browser, address) as visit:
        await visit.page.evaluate(
            "document.querySelector('.text').innerHTML = "
            + "".join(f"\"<span class='token {origin}'>x</span>\" + " for origin in ORIGINS)
            + "''"
        )
        styles = [await style_of(visit, origin) for origin in ORIGINS]
        assert len({(line, ground == "rgba(0, 0, 0, 0)") for _, line, ground in styles}) == 4


async def test_the_timeline_moves_and_drafting_lies_under_verification(browser: Browser, address: str) -> None:
    async with visiting(browser, address) as visit:
        await visit.ask(tokens=120)
        await visit.shows(".progress", "tokens in")
        before = await visit.page.evaluate("document.querySelector('canvas').toDataURL()")
        await visit.page.wait_for_function(
            "before => document.querySelector('canvas').toDataURL() !== before", arg=before
        )
        await visit.finish()
        await visit.shows("#timeline-told", "of drafting lay under a target step")
        lanes = await visit.history("history.orderedLanes().map(lane => [lane.kind, lane.bars.length])")
        assert [kind for kind, _ in lanes] == ["target", "draft"]
        assert all(num_bars > 12 for _, num_bars in lanes)
        overlapping = """history.orderedLanes()[1].bars.filter(draft => history.orderedLanes()[0].bars.some(
            verify => verify.name === 'verify' && draft.start < verify.end && verify.start < draft.end)).length"""
        assert await visit.history(overlapping) > 10
        told = "({ history }) => history.rounds.reduce((sum, round) => sum + round.tokens, 0) === 120"
        await visit.page.wait_for_function(f"async url => ({told})(await import(url))", arg=await visit.store_url())


async def test_draft_steps_that_were_verified_are_told_from_those_in_vain(browser: Browser, address: str) -> None:
    async with visiting(browser, address) as visit:
        await visit.page.select_option("#mode", "sync")  # the target waits for its drafts
        await visit.ask(tokens=40)
        await visit.finish()
        await visit.shows("#timeline-told", "drafting")
        assert await visit.history("history.orderedLanes()[1].bars.filter(bar => bar.isUsed).length") > 5
        linked = "history.orderedLanes()[0].bars.filter(bar => history.linkedBars(bar).size).length"
        assert await visit.history(linked) > 3


async def test_other_clients_requests_are_seen_too(browser: Browser, service: RunningService, address: str) -> None:
    from specpipe.client import GenerateClient, GenerateRequest

    async with visiting(browser, address) as visit, GenerateClient(service.address) as client:
        await client.answer(GenerateRequest(prompt="import os\n", max_tokens=60, ignore_eos=True), timeout_s=60)
        await visit.shows("#timeline-told", "target")
        await visit.page.wait_for_function("document.querySelectorAll('.chart .bar[height=\"0\"]').length < 60")
        shown = await visit.page.inner_text(".acceptance")
        assert "drafted round" in shown
        assert await visit.page.locator(".text .token").count() == 0


async def test_the_workers_are_told(browser: Browser, service: RunningService, address: str) -> None:
    async with visiting(browser, address) as visit:
        rows = [await row.inner_text() for row in await visit.page.locator("tbody tr").all()]
        for row, role in zip(rows, ("target-worker", "draft-worker"), strict=True):
            assert service.address_of(role) in row
            assert "connected" in row


# How it is used


async def test_everything_is_reached_by_tab_in_reading_order_and_visibly(browser: Browser, address: str) -> None:
    async with visiting(browser, address) as visit:
        await visit.page.focus("#prompt")
        seen, outlines = [], []
        for _ in range(9):
            await visit.page.keyboard.press("Tab")
            focused: Any = await visit.page.evaluate(
                "(e => [e.id || e.textContent.trim().slice(0, 12) || e.tagName, getComputedStyle(e).outlineStyle])"
                "(document.activeElement)"
            )
            seen.append(focused[0])
            outlines.append(focused[1])
        assert seen[:5] == ["mode", "temperature", "tokens", "seed", "Send"]
        assert seen[-1] == "CANVAS"
        assert "Pause" in seen
        assert "none" not in outlines


async def test_escape_stops_an_answer_and_its_request(browser: Browser, address: str) -> None:
    async with visiting(browser, address) as visit:
        await visit.ask(tokens=4000, prompt="x = 1\n")
        await visit.shows(".progress", "tokens in")
        assert await visit.page.is_disabled(".primary")
        await visit.page.keyboard.press("Escape")
        await visit.shows(".progress", "stopped after")
        await visit.shows(".speed", "0 requests answered now")
        assert await visit.page.is_enabled(".primary")
        await visit.ask(tokens=8)
        await visit.finish()


async def test_a_question_that_is_refused_says_why(browser: Browser, address: str) -> None:
    async with visiting(browser, address) as visit:
        await visit.ask(prompt="")
        await visit.shows("[role=alert]", "prompt: it must have at least one character, token id or message")
        await visit.ask(prompt="x", temperature="-1")
        await visit.shows("[role=alert]", "temperature must be a finite number of at least 0, got -1.0")
        await visit.ask(temperature="0", tokens=8)
        await visit.finish()
        assert await visit.page.locator("[role=alert]").count() == 0
        visit.problems.clear()  # the browser reports the refused requests as well


async def test_the_same_seed_gives_the_same_answer_in_every_mode(browser: Browser, address: str) -> None:
    async with visiting(browser, address) as visit:
        texts = set()
        for mode in ("pipelined", "sync", "off"):
            await visit.page.select_option("#mode", mode)
            await visit.ask(tokens=24, seed="18446744073709551615", temperature="0.8")
            await visit.page.wait_for_selector(f".statistics:has-text('{mode}')")
            texts.add(await visit.page.inner_text(".text"))
        assert len(texts) == 1


async def test_steps_are_walked_by_arrow_keys_and_held_by_space(browser: Browser, address: str) -> None:
    async with visiting(browser, address, color_scheme="dark") as visit:
        await visit.ask(tokens=60, seed="7")
        await visit.finish()
        await visit.shows("#timeline-told", "drafting")
        await visit.page.focus("canvas")
        await visit.page.keyboard.press("ArrowLeft")
        await visit.shows(".details", "verify · step")
        assert await visit.page.inner_text(".timeline button") == "Go on"
        await visit.page.keyboard.press("ArrowDown")
        await visit.shows(".details", "draft · step")
        await visit.page.keyboard.press("ArrowUp")
        await visit.page.keyboard.press("+")
        while not await walks_to_drafts(visit):  # on a busy machine they may be late for a whole answer
            await visit.page.keyboard.press(" ")
            await visit.ask(tokens=60, seed="7")
            await visit.finish()
            await visit.page.focus("canvas")
        await visit.shows(".details", "verify · step")
        await visit.picture("live-page-step", clip=await around(visit, ".timeline", ".details"))
        await visit.page.keyboard.press(" ")
        assert await visit.page.inner_text(".timeline button") == "Pause"
        await visit.page.hover("h1")
        await visit.page.focus("#prompt")
        await visit.page.wait_for_selector(".details", state="detached")


async def walks_to_drafts(visit: Visit) -> bool:
    """To the left, up to a round whose nodes have their draft steps framed. False if there is none in fifty."""
    for _ in range(50):
        await visit.page.keyboard.press("ArrowLeft")
        if "drafted in" in await visit.page.inner_text(".details"):
            return True
    return False


async def around(visit: Visit, *selectors: str) -> Any:
    """The rectangle that holds all of them."""
    boxes = [box for name in selectors if (box := await visit.page.locator(name).bounding_box()) is not None]
    left, top = (min(box[side] for box in boxes) - 8 for side in ("x", "y"))
    right = max(box["x"] + box["width"] for box in boxes) + 8
    bottom = max(box["y"] + box["height"] for box in boxes) + 8
    return {"x": left, "y": top, "width": right - left, "height": bottom - top}


# How it looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_follows_the_system_s_colours_and_all_text_is_readable(
    browser: Browser, address: str, scheme: Any
) -> None:
    async with visiting(browser, address, color_scheme=scheme) as visit:
        await visit.ask(tokens=60, seed="7")
        await visit.finish()
        await visit.shows("#timeline-told", "drafting")
        pairs = await visit.page.evaluate(CONTRASTS)
        assert len(pairs) > 50
        assert [pair for pair in pairs if pair[1] < 4.5] == []
        page = await visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        is_dark = sum(map(int, page.removeprefix("rgb(").removesuffix(")").split(","))) < 200
        assert is_dark == (scheme == "dark")
        await visit.picture(f"live-page-{scheme}", full_page=True)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
async def test_nothing_sticks_out(browser: Browser, address: str, size: dict[str, int]) -> None:
    async with visiting(browser, address, **size) as visit:
        await visit.ask(tokens=24, prompt="def add(left, right):  # " + "a_very_long_name" * 12 + "\n")
        await visit.finish()
        await visit.page.focus("canvas")
        await visit.page.keyboard.press("ArrowLeft")
        await visit.page.wait_for_selector(".details")
        assert await visit.page.evaluate("document.documentElement.scrollWidth") == size["width"]
        if size is NARROW:
            await visit.page.focus("#prompt")
            await visit.picture("live-page-narrow")


async def test_who_asked_for_less_motion_gets_less(browser: Browser, address: str) -> None:
    async with visiting(browser, address, reduced_motion="reduce") as visit:
        assert await visit.page.eval_on_selector(".depths i", "e => getComputedStyle(e).transitionDuration") == "0s"
        await visit.ask(tokens=40)
        await visit.finish()
        await visit.shows("#timeline-told", "drafting")


CONTRASTS = """
() => {
  const parse = (color) => (color.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll("body *")].filter((element) =>
    [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) &&
    element.checkVisibility() && !element.closest("button:disabled, option, title, noscript"));
  return texts.map((element) => {
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground(element))].sort((x, y) => y - x);
    return [`${element.className || element.tagName}: ${element.textContent.slice(0, 20)}`, (a + 0.05) / (b + 0.05)];
  });
}
"""
