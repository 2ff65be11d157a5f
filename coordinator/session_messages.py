"""What workers and the client are told of a request as it stands.

Owns: how Open, Started, the answer to NeedTokens, and the word that no drafts come are made. Must not know: who gets
them, phases, clocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.requests import Request
from specpipe.answers import Started
from specpipe.types import Commit, Extension, NeedTokens, Open, Origin


def open_session(session: int, request: Request, tokens: Sequence[int], now_ms: float) -> Open:
    """The session of a request that has these tokens: everything else is computed from them."""
    return Open(
        session=session,
        request_id=request.request_id,
        tokens=tuple(tokens),
        num_prompt_tokens=len(request.prompt),
        sampling=request.sampling,
        stops=request.stops,
        speculation=request.speculation,
        remaining_ms=None if request.deadline_ms is None else max(0.0, request.deadline_ms - now_ms),
        trace_context=request.trace_context,
        vocab_size=request.vocab_size,
        wants_reports=request.wants_reports,
    )


def answer_need(session: int, tokens: Sequence[int], have: int) -> Commit | NeedTokens | None:
    """One commit from there. A worker that has more than is held here is asked for it in turn."""
    if have > len(tokens):
        return NeedTokens(session=session, have=len(tokens))
    if have == len(tokens):
        return None
    missing = tuple(tokens[have:])
    return Commit(session=session, round=0, base=have, tokens=missing, origins=(Origin.PLAIN,) * len(missing))


def no_drafts(session: int, base: int) -> Extension:
    """For a target worker: none will come below so many tokens."""
    return Extension(session=session, base=base, parents=(), tokens=(), confidences=(), is_exhausted=True)


def started(request: Request) -> Started:
    return Started(
        request_id=request.request_id,
        model=request.model,
        prompt_tokens=len(request.prompt),
        seed=request.sampling.seed,
        rule=request.speculation.rule,
    )
