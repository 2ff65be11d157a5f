"""Traces shown to people: lines on a terminal, or a file whose name says what it is.

Owns: which files can be written, how long a trace may take to be complete. Must not know: what a picture looks like.
What draws is loaded only when something is drawn.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console

from specpipe.cli.failure import say_error
from specpipe.client import GenerateClient
from specpipe.errors import ConfigError, SpecpipeError
from specpipe.spans import KeptTrace

if TYPE_CHECKING:
    from specpipe.timeline.model import Timeline

COMPLETE_WITHIN_S: Final = 3.0  # after an answer workers may still tell what they did for it
ASK_AGAIN_AFTER_S: Final = 0.05
SUFFIXES: Final = (".html", ".svg")

RoundRange = tuple[int, int]


def check_picture(flag: str, path: Path) -> None:
    """Raises ConfigError unless a picture can be written there: said before anything is asked or started."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{flag} needs a name that ends in .html or .svg, got {str(path)!r}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag}: there is no folder for {str(path)!r}, or it is one")


async def finished_trace(client: GenerateClient, request_id: str) -> KeptTrace:
    """The trace of a request that has just ended, once it is complete; as it is if that takes too long.

    Raises as `get_trace` does.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + COMPLETE_WITHIN_S
    trace = await client.get_trace(request_id)
    while not trace.is_complete and loop.time() < give_up_s:
        await asyncio.sleep(ASK_AGAIN_AFTER_S)
        trace = await client.get_trace(request_id)
    return trace


def write_picture(timeline: Timeline, path: Path, wanted: RoundRange | None = None) -> None:
    """Raises ConfigError if the file cannot be written, or if there are no such rounds."""
    from specpipe.timeline import page, svg

    text = page.render(timeline) if path.suffix.lower() == ".html" else svg.render(timeline, wanted=wanted)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def write_lines(timeline: Timeline, stream: TextIO, wanted: RoundRange | None = None, *, more: str = "") -> None:
    """As wide as the terminal; without colours where it has none. Raises ConfigError if there are no such rounds."""
    from specpipe.timeline import terminal
    from specpipe.timeline.glyphs import ASCII, UNICODE

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    glyphs = UNICODE if console.encoding.startswith("utf") else ASCII
    for line in terminal.render(timeline, width=console.width, glyphs=glyphs, wanted=wanted, more=more):
        console.print(line, soft_wrap=True)


class TraceOutput:
    """What `generate` shows of its answers' traces, one after the other."""

    def __init__(self, *, path: Path | None, num_prompts: int, is_shown: bool) -> None:
        """`path`: with several prompts each trace has a file of its own, with the prompt's number before the suffix.
        `is_shown`: on stderr, too."""
        self._path = path
        self._num_prompts = num_prompts
        self._is_shown = is_shown
        self._num_seen = 0

    def show(self, trace: KeptTrace | SpecpipeError | None) -> bool:
        """None: the answer had none, and its error has been said. Returns whether the trace was there to be shown."""
        from specpipe.timeline.layout import lay_out

        self._num_seen += 1
        if trace is None:
            return True
        if isinstance(trace, SpecpipeError):
            say_error(f"the trace cannot be shown: {trace}")
            return False
        timeline = lay_out(trace)
        if self._is_shown:
            sys.stdout.flush()
            write_lines(timeline, sys.stderr, more="--trace-file FILE.html draws all")
        if self._path is not None:
            write_picture(timeline, self._numbered(self._path))
        return True

    def _numbered(self, path: Path) -> Path:
        return path if self._num_prompts == 1 else path.with_stem(f"{path.stem}-{self._num_seen}")
