"""`make demo`: the main job with the demo pair, on this machine, as a person sees it; then the same without drafts.

Fails unless drafted tokens were accepted: an answer of the target alone would prove nothing.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

from specpipe.answers import AnswerEvent
from specpipe.cli.failure import exit_code_of, say_error
from specpipe.cli.flags import ServiceFlags, SpeculationFlags
from specpipe.cli.generate import answer_all, service_config
from specpipe.cli.output import PlainOutput, counted
from specpipe.cli.progress import loading_bars
from specpipe.cli.signals import run_with_signals
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.errors import SpecpipeError
from specpipe.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_TERMINATED
from specpipe.launcher import LocalService, ServiceConfig
from specpipe.telemetry.logs import configure_logging
from specpipe.types import Mode, Origin

PROMPT: Final = 'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a text file."""\n'
REQUEST: Final = GenerateRequest(prompt=PROMPT, temperature=0, max_tokens=200)


class KeepingOutput(PlainOutput):
    """Plain output that keeps the answer."""

    def __init__(self) -> None:
        super().__init__(1, is_echoing=True)
        self.answer = Answer()

    async def show(self, request: GenerateRequest, events: AsyncIterator[AnswerEvent]) -> bool:
        return await super().show(request, self._kept(events))

    async def _kept(self, events: AsyncIterator[AnswerEvent]) -> AsyncIterator[AnswerEvent]:
        async for event in events:
            self.answer.add(event)
            yield event


def main() -> int:
    """Returns the exit code."""
    configure_logging("warning")
    try:
        config = service_config(ServiceFlags(), SpeculationFlags(), [REQUEST], "warning")
        return run_with_signals(lambda _: run(config), terminated=EXIT_TERMINATED)
    except SpecpipeError as error:
        say_error(str(error))
        return exit_code_of(error)


async def run(config: ServiceConfig) -> int:
    output = KeepingOutput()
    async with LocalService(config) as service:
        with loading_bars() as on_progress:
            await service.start(on_progress)
        code = await answer_all(service.address, [REQUEST], output)
        if code != EXIT_OK:
            return code
        async with GenerateClient(service.address) as client:
            plain = await client.answer(replace(REQUEST, mode=Mode.OFF))
    output.write_note(comparison(output.answer, plain))
    if Origin.ACCEPTED not in output.answer.origins:
        say_error("no drafted token was accepted")
        return EXIT_FAILED
    return EXIT_OK


def comparison(pipelined: Answer, plain: Answer) -> str:
    """One line: what drafting was good for. A speed does not count the time to the first token."""
    line = "the same prompt without drafts (mode off)"
    ours, theirs = (a.finished.timing.tpot_ms if a.finished else None for a in (pipelined, plain))
    if ours and theirs:
        line += f": {1000 / theirs:.1f} tokens/s; with them {theirs / ours:.2f} times as fast"
    return f"{line}, and {_same_tokens(pipelined.token_ids, plain.token_ids)}"


def _same_tokens(ours: list[int], theirs: list[int]) -> str:
    if ours == theirs:
        return f"the same {counted(len(ours), 'token')}"
    num_same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
    return f"the same first {counted(num_same, 'token')}: then two were too close (README, What is promised)"


if __name__ == "__main__":
    sys.exit(main())
