"""A real browser on the live page."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright

CHROMIUM = shutil.which("chromium")
PICTURES = Path(__file__).parents[2] / "docs" / "images"
MAX_PICTURE_BYTES = 150_000
PATIENCE_MS = 60_000  # on a busy machine
NOBODY_LOOKS_AT = "WebUIOmniboxPopup,WebUIOmniboxAimPopup"  # pages of the address bar: one process more a window


@asynccontextmanager
async def launched() -> AsyncIterator[Browser]:
    """Debian's Chromium; root has no sandbox there."""
    arguments = [f"--disable-features={NOBODY_LOOKS_AT}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


class Visit:
    """One page, and everything that went wrong on it."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        self._address = address
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._note_console)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("requestfailed", self._note_failure)
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    async def open(self) -> None:
        """Returns when the page knows the workers."""
        await self.page.goto(f"http://{self._address}/ui")
        await self.page.wait_for_selector("tbody tr")
        await self.page.wait_for_selector(".health.ready")

    async def ask(self, *, prompt: str | None = None, tokens: int = 60, **fields: str) -> None:
        """Send, by keyboard."""
        for name, value in {"tokens": str(tokens), **fields}.items():
            await self.page.fill(f"#{name}", value)
        if prompt is not None:
            await self.page.fill("#prompt", prompt)
        await self.page.focus("#prompt")
        await self.page.keyboard.press("Control+Enter")

    async def finish(self) -> None:
        """Returns when the answer is complete."""
        await self.page.wait_for_selector(".statistics")

    async def shows(self, selector: str, text: str) -> None:
        """Returns when it does."""
        await self.page.wait_for_selector(f"{selector}:has-text({text!r})")

    async def count(self, origin: str) -> int:
        return await self.page.locator(f".text .token.{origin}").count()

    async def history(self, expression: str) -> Any:
        """Evaluate with `history`, the page's own, at hand."""
        module = await self.store_url()
        return await self.page.evaluate(f"import({module!r}).then(({{ history }}) => ({expression}))")

    async def store_url(self) -> str:
        """Of the module that holds what the page knows."""
        script = "document.querySelector('script[type=module]').src.replace('main.js', 'store.js')"
        return str(await self.page.evaluate(script))

    async def picture(self, name: str, **options: Any) -> None:
        """For the docs, when they are asked for; drawn always, so that it can be."""
        folder = os.environ.get("SPECPIPE_SCREENSHOTS")
        image = await self.page.screenshot(**options)
        assert image.startswith(b"\x89PNG")
        if folder:
            target = PICTURES if folder == "1" else Path(folder)
            target.mkdir(parents=True, exist_ok=True)
            (target / f"{name}.png").write_bytes(image)

    def _note_console(self, message: ConsoleMessage) -> None:
        self.problems.append(f"{message.type}: {message.text}")

    def _note_failure(self, request: Request) -> None:
        if not request.url.endswith(("/ui/api/events", "/ui/api/generate")):  # ended by the page itself
            self.problems.append(f"failed: {request.url}: {request.failure}")


@asynccontextmanager
async def visiting(
    browser: Browser, address: str, *, width: int = 1280, height: int = 860, **options: Any
) -> AsyncIterator[Visit]:
    """The page, opened. Whatever the browser complained of fails the test at the end."""
    context = await browser.new_context(viewport={"width": width, "height": height}, **options)
    try:
        visit = Visit(await context.new_page(), address)
        await visit.open()
        yield visit
        assert visit.problems == []
        assert visit.hosts == {address}
    finally:
        await context.close()
