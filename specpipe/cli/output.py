"""What `generate` shows: JSON objects for programs, or streamed text with a line of statistics for people.

Owns: the shape of the JSON and of the statistics line, and what goes where: answers to stdout, what is said about them
to stderr. Must not know: where events come from.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Final, Protocol

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from specpipe.answers import AnswerEvent, ChatMessage, Chunk, Finished, SpeculationStats, Started
from specpipe.cli.failure import say_error, say_note
from specpipe.client import Answer, GenerateRequest
from specpipe.errors import SpecpipeError
from specpipe.types import Mode, Origin

ACCEPTED_STYLE: Final = Style(color="green")  # drafted and accepted
TARGET_STYLE: Final = Style(bold=True)  # the target's own
NOTE_STYLE: Final = Style(dim=True)
VISIBLE_CONTROLS: Final = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
MAX_ECHO_CHARS: Final = 2_000  # of a prompt's end
MAX_NAMED_CHARS: Final = 60  # of a prompt that an error is about
MS_DECIMALS: Final = 3  # in JSON: microseconds
RATE_DECIMALS: Final = 4


class Output(Protocol):
    async def show(self, request: GenerateRequest, events: AsyncIterator[AnswerEvent]) -> bool:
        """Show one answer as it comes. Returns whether it was answered; its error, if not, has been shown."""
        ...


class ModeNote:
    """Says once, on stderr, that a mode was asked for in vain."""

    def __init__(self) -> None:
        self._is_said = False

    def check(self, request: GenerateRequest, answer: Answer) -> None:
        asked, stats = request.mode, answer.finished and answer.finished.speculation
        if self._is_said or not stats or stats.mode is not Mode.OFF or asked in (None, Mode.OFF):
            return
        self._is_said = True
        say_note(f"mode {asked.value} was asked for, but nothing drafts in this service: it decodes plainly (mode off)")


class JsonOutput:
    """One object a prompt, written as soon as it is complete, and nothing else."""

    def __init__(self) -> None:
        self._mode_note = ModeNote()

    async def show(self, request: GenerateRequest, events: AsyncIterator[AnswerEvent]) -> bool:
        answer = Answer()
        try:
            async for event in events:
                answer.add(event)
            shown = answer_json(request, answer)
        except SpecpipeError as error:
            shown = error_json(request, error)
        sys.stdout.write(json.dumps(shown) + "\n")
        sys.stdout.flush()
        self._mode_note.check(request, answer)
        return "error" not in shown


class PlainOutput:
    """Text as it comes; tokens that were guessed ahead and accepted in another colour than the target's own.

    Stdout has answers and what keeps them apart: a line before each of several prompts. A single prompt is echoed
    before its answer, which goes on from it: by default on a terminal only, so that a file gets the answer alone.
    Statistics and errors go to stderr.
    """

    def __init__(self, num_prompts: int, *, is_echoing: bool | None = None) -> None:
        console, notes = Console(), Console(stderr=True)
        self._is_terminal = console.is_terminal
        self._colors = colors_of(console)
        self._note_colors = colors_of(notes)
        self._is_echoing = num_prompts == 1 and (console.is_terminal if is_echoing is None else is_echoing)
        self._num_prompts = num_prompts
        self._num_shown = 0
        self._is_line_open = False  # on stdout
        self._mode_note = ModeNote()

    async def show(self, request: GenerateRequest, events: AsyncIterator[AnswerEvent]) -> bool:
        self._num_shown += 1
        if self._num_prompts > 1:
            self._write(f"{self._number}{prompt_json(request)!r}\n", NOTE_STYLE)
        answer = Answer()
        try:
            async for event in events:
                answer.add(event)
                if isinstance(event, Started) and self._is_echoing:
                    self._write(echo_of(request), NOTE_STYLE)
                if isinstance(event, Chunk):
                    self._write_chunk(event)
            note = statistics_line(answer)
        except SpecpipeError as error:
            self._end_line()
            say_error(f"{self._name_of(request)}{error}")
            return False
        except asyncio.CancelledError:
            if self._is_terminal:  # for the shell's next prompt
                self._end_line()
            raise
        self._end_line()
        self.write_note(self._number + note)
        self._mode_note.check(request, answer)
        return True

    def write_note(self, note: str) -> None:
        """A line about an answer."""
        line = note + "\n"
        sys.stderr.write(NOTE_STYLE.render(line, color_system=self._note_colors) if self._note_colors else line)
        sys.stderr.flush()

    @property
    def _number(self) -> str:
        """Which of several prompts it is about."""
        return f"[{self._num_shown}/{self._num_prompts}] " if self._num_prompts > 1 else ""

    def _name_of(self, request: GenerateRequest) -> str:
        """Of one of several prompts, before what went wrong with it."""
        if self._num_prompts == 1:
            return ""
        shown = repr(prompt_json(request))
        kept = shown if len(shown) <= MAX_NAMED_CHARS else shown[:MAX_NAMED_CHARS] + "…"
        return f"prompt {self._num_shown} of {self._num_prompts} ({kept}): "

    def _end_line(self) -> None:
        if self._is_line_open:
            self._write("\n", Style.null())

    def _write_chunk(self, chunk: Chunk) -> None:
        for text, origin in chunk.pieces():
            self._write(text, ACCEPTED_STYLE if origin is Origin.ACCEPTED else TARGET_STYLE)

    def _write(self, text: str, style: Style) -> None:
        """As it is; only a terminal gets colours, and no control characters of a model's making."""
        self._is_line_open = not text.endswith("\n") if text else self._is_line_open
        if self._is_terminal:
            text = text.translate(VISIBLE_CONTROLS)
        if self._colors is not None:
            text = style.render(text, color_system=self._colors)
        sys.stdout.write(text)
        sys.stdout.flush()


def colors_of(console: Console) -> ColorSystem | None:
    return ColorSystem.STANDARD if console.is_terminal and not console.no_color else None


def echo_of(request: GenerateRequest) -> str:
    """What an answer goes on from: the end of a text; what was said last, and ids, in a line of their own."""
    prompt = prompt_json(request)
    shown = prompt if isinstance(prompt, str) else str(prompt)
    kept = shown if len(shown) <= MAX_ECHO_CHARS else "…" + shown[-MAX_ECHO_CHARS:]
    return kept if isinstance(request.prompt, str) else kept + "\n"


def answer_json(request: GenerateRequest, answer: Answer) -> dict[str, Any]:
    """The documented object of one answer."""
    started, finished = complete(answer)
    stats = finished.speculation
    return {
        "prompt": prompt_json(request),
        "request_id": started.request_id,
        "seed": started.seed,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": finished.finish_reason.value,
        "usage": {"prompt_tokens": finished.prompt_tokens, "completion_tokens": finished.completion_tokens},
        "timing": rounded(asdict(finished.timing)),
        "speculation": rounded({**asdict(stats), "mode": stats.mode.value, "rule": stats.rule.value}),
    }


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Fractions without digits that mean nothing; whatever else as it is."""
    decimals = {name: MS_DECIMALS if name.endswith("_ms") else RATE_DECIMALS for name in values}
    return {name: round(v, decimals[name]) if isinstance(v, float) else v for name, v in values.items()}


def error_json(request: GenerateRequest, error: SpecpipeError) -> dict[str, Any]:
    return {"prompt": prompt_json(request), "error": {"code": error.code.value, "message": str(error)}}


def prompt_json(request: GenerateRequest) -> str | list[int]:
    """As it was given: the text, or the token ids."""
    if isinstance(request.prompt, str):
        return request.prompt
    texts = [m.content for m in request.prompt if isinstance(m, ChatMessage)]
    return texts[-1] if texts else [i for i in request.prompt if isinstance(i, int)]


def complete(answer: Answer) -> tuple[Started, Finished]:
    """Raises SpecpipeError if the stream ended without saying how: such an answer must not pass for a whole one."""
    if answer.started is None or answer.finished is None:
        raise SpecpipeError("the service ended the answer without saying why")
    return answer.started, answer.finished


def statistics_line(answer: Answer) -> str:
    """All that one wants to see after an answer, in one line. docs/statistics.md explains it part by part."""
    started, finished = complete(answer)
    stats, timing, num_tokens = finished.speculation, finished.timing, finished.completion_tokens
    reason = finished.finish_reason.value if answer.text else f"{finished.finish_reason.value}, no text"
    parts = [
        f"{counted(num_tokens, 'token')} in {timing.total_ms / 1000:.2f} s ({reason})",
        f"first after {timing.ttft_ms:.0f} ms",
    ]
    if timing.tpot_ms:
        parts.append(f"{1000 / timing.tpot_ms:.1f} tokens/s")
    parts.append(stats.mode.value)
    if stats.mean_acceptance_length is not None:
        parts.append(f"{counted(stats.rounds, 'round')}, {stats.mean_acceptance_length:.2f} tokens a round")
    if stats.mode is not Mode.OFF:
        parts += _draft_parts(stats, num_tokens)
    parts.append(f"seed {started.seed}")
    return " · ".join(parts)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _draft_parts(stats: SpeculationStats, num_tokens: int) -> list[str]:
    parts = [f"{stats.accepted_tokens} of {counted(num_tokens, 'token')} guessed ahead"]
    if stats.acceptance_rate is not None:
        parts.append(f"acceptance rate {stats.acceptance_rate:.2f} (of first guesses)")
    if stats.hit_rate is not None:
        looked_up = f" ({stats.lookup_rate:.2f} by lookup alone)" if stats.lookup_rate else ""
        parts.append(f"hit rate {stats.hit_rate:.2f}{looked_up}")
    parts.append(f"drafting {stats.draft_ms:.0f} ms, target waited {stats.exposed_draft_ms:.0f} ms")
    return parts
