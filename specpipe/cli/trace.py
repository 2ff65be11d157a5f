"""`specpipe trace`: what a running service saw of a request, as a timeline.

Owns: one run, from flags to exit code. `specpipe.cli.pictures` shows it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer

from specpipe.cli.flags import TlsFlags, checked_address, option, takes_flags, tls_config
from specpipe.cli.pictures import RoundRange, check_picture, write_lines, write_picture
from specpipe.cli.signals import run_with_signals
from specpipe.client import GenerateClient
from specpipe.errors import ConfigError
from specpipe.exit_codes import EXIT_OK, EXIT_TERMINATED
from specpipe.spans import KeptTrace

MORE: Final = "--rounds A-B draws those, --output FILE.html all"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags:
    """Flags of `trace`."""

    connect: Annotated[
        list[str], option("The service that answered the request; may be repeated.", metavar="HOST:PORT")
    ] = field(default_factory=list)
    output: Annotated[Path | None, option("Write a page (FILE.html) or a picture (FILE.svg) instead.")] = None
    rounds: Annotated[str | None, option("These rounds only, as in 7-20.", metavar="A-B")] = None
    json: Annotated[bool, option("The spans, rounds and sums as one JSON object.", "--json")] = False


@takes_flags(own=TraceFlags, tls=TlsFlags)
def trace(
    request_id: Annotated[
        str, typer.Argument(help="As `generate --json` says it, or the id of its trace.", metavar="REQUEST_ID")
    ],
    *,
    own: TraceFlags,
    tls: TlsFlags,
) -> int:
    """Show every round of a request that was traced: what each worker did, when, and what was waited for."""
    if not own.connect:
        raise ConfigError("give the service that answered the request with --connect HOST:PORT")
    addresses, wanted = [checked_address("--connect", address) for address in own.connect], _wanted(own)
    client = GenerateClient(addresses, tls_config(tls))
    return run_with_signals(lambda _: _run(client, request_id, own, wanted), terminated=EXIT_TERMINATED)


def _wanted(own: TraceFlags) -> RoundRange | None:
    """Raises ConfigError for flags that cannot be meant together."""
    from specpipe.timeline.strips import parse_rounds

    if own.json and own.output:
        raise ConfigError("--json and --output cannot be used together")
    if own.output is not None:
        check_picture("--output", own.output)
    if own.rounds is None:
        return None
    if own.json or (own.output is not None and own.output.suffix.lower() == ".html"):
        raise ConfigError("--rounds is for the terminal and for .svg: a page and --json have all rounds")
    return parse_rounds(own.rounds)


async def _run(client: GenerateClient, request_id: str, own: TraceFlags, wanted: RoundRange | None) -> int:
    async with client:
        kept = await client.get_trace(request_id)
    _show(kept, request_id, own, wanted)
    return EXIT_OK


def _show(kept: KeptTrace, request_id: str, own: TraceFlags, wanted: RoundRange | None) -> None:
    from specpipe.timeline.json_form import trace_json
    from specpipe.timeline.layout import lay_out

    if own.json:
        sys.stdout.write(json.dumps(trace_json(kept)) + "\n")
        return
    timeline = lay_out(kept, request_id=request_id)
    if own.output is not None:
        write_picture(timeline, own.output, wanted)
    else:
        write_lines(timeline, sys.stdout, wanted, more=MORE)
