"""`make demo`: the main job with the demo pair, on this machine, as a person sees it.

Fails unless drafted tokens were accepted: an answer of the target alone would prove nothing.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Final

from specpipe.answers import AnswerEvent, Chunk
from specpipe.cli.failure import EXIT_FAILED, EXIT_TERMINATED, exit_code_of, say_error
from specpipe.cli.flags import ServiceFlags, SpeculationFlags
from specpipe.cli.generate import answer_with_service, service_config
from specpipe.cli.output import PlainOutput
from specpipe.cli.signals import run_with_signals
from specpipe.client import GenerateRequest
from specpipe.errors import SpecpipeError
from specpipe.telemetry.logs import configure_logging
from specpipe.types import Origin

PROMPT: Final = 'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a text file."""\n'
REQUEST: Final = GenerateRequest(prompt=PROMPT, temperature=0, max_tokens=200)


class CountingOutput(PlainOutput):
    """Plain output that counts what was drafted and accepted."""

    num_accepted = 0

    async def show(self, request: GenerateRequest, events: AsyncIterator[AnswerEvent]) -> bool:
        return await super().show(request, self._counted(events))

    async def _counted(self, events: AsyncIterator[AnswerEvent]) -> AsyncIterator[AnswerEvent]:
        async for event in events:
            if isinstance(event, Chunk):
                self.num_accepted += event.origins.count(Origin.ACCEPTED)
            yield event


def main() -> int:
    """Returns the exit code."""
    configure_logging("warning")
    output = CountingOutput(1, is_echoing=True)
    try:
        config = service_config(ServiceFlags(), SpeculationFlags(), [REQUEST], "warning")
        code = run_with_signals(lambda _: answer_with_service(config, [REQUEST], output), terminated=EXIT_TERMINATED)
    except SpecpipeError as error:
        say_error(str(error))
        return exit_code_of(error)
    if code == 0 and not output.num_accepted:
        say_error("no drafted token was accepted")
        return EXIT_FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())
