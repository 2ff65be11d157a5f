"""The live page while things break: workers that go, a service that goes and comes back. The service is in the test."""

from __future__ import annotations

import pytest
from browsing import CHROMIUM, Visit, visiting
from coordinator_cluster import cluster
from playwright.async_api import Browser
from starlette.types import Message
from waiting import wait_until

from coordinator.web import answers

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)"),
    pytest.mark.timeout(180),
]


async def test_a_worker_that_goes_and_comes_back_is_told_and_answers_go_on(browser: Browser) -> None:
    async with cluster(http_port=0) as service, visiting(browser, service.app.http_address) as visit:
        await service.drafts[0].stop()
        await visit.shows("tbody tr:nth-child(2)", "not connected: dialled again")
        await visit.ask(tokens=8)
        await visit.finish()
        await service.drafts[0].start()
        await visit.page.wait_for_selector("tbody tr:nth-child(2).connected")


async def test_a_page_that_is_closed_ends_its_answer_and_stops_watching(browser: Browser) -> None:
    async with cluster(http_port=0) as service:
        service.targets[0].gated.delay_s = 0.02
        async with visiting(browser, service.app.http_address) as visit:
            await visit.ask(tokens=400)
            await visit.shows(".progress", "tokens in")
            assert service.coordinator.tracing.is_watched
        await wait_until(lambda: service.is_idle)
        await wait_until(lambda: not service.coordinator.tracing.is_watched)


async def test_an_answer_that_breaks_off_says_why_and_keeps_what_came(browser: Browser) -> None:
    async with cluster(http_port=0) as service, visiting(browser, service.app.http_address) as visit:
        service.targets[0].gated.delay_s = 0.02
        await visit.ask(tokens=400)
        await visit.shows(".progress", "tokens in")
        service.targets[0].freeze()
        await visit.shows("[role=alert]", "no target worker took the request")
        await visit.shows(".progress", "broken off after")
        assert await visit.page.locator(".text .token").count() > 0
        assert await visit.page.locator(".statistics").count() == 0
        await visit.shows(".health", "waits for a target worker")


async def test_what_only_keeps_the_connection_open_is_no_part_of_the_answer(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    part = answers._part

    def noted(body: bytes, *, is_last: bool = False) -> Message:
        sent.append(body)
        return part(body, is_last=is_last)

    monkeypatch.setattr(answers, "_part", noted)
    monkeypatch.setattr(answers.EventStream, "comment_every_s", 0.02)
    async with cluster(http_port=0) as service, visiting(browser, service.app.http_address) as visit:
        service.targets[0].gate.clear()
        await visit.ask(tokens=8)
        await wait_until(lambda: answers.COMMENT in sent)
        service.targets[0].gate.set()
        await visit.finish()


async def test_a_service_that_comes_back_is_found_again(browser: Browser) -> None:
    async with cluster(http_port=0) as service:
        address = service.app.http_address
        context = await browser.new_context()
        page = await context.new_page()
        visit = Visit(page, address)
        await visit.open()
    await visit.shows(".health", "not reachable, trying again")
    await visit.shows("tbody tr", "not known")
    async with cluster(http_port=int(address.rpartition(":")[2])):
        await visit.page.wait_for_selector(".health.ready")
        await visit.ask(tokens=8)
        await visit.finish()
        await context.close()
