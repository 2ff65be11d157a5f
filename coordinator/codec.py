"""The public messages as values and back.

Owns: protobuf of GenerateService. Must not know: what is valid (`coordinator.validation`), how answers come about.
"""

from __future__ import annotations

from typing import Any

from coordinator.requests import Question
from specpipe.answers import AnswerEvent, ChatMessage, Chunk, Finished, Prompt, SpeculationStats, Started
from specpipe.codec_enums import FINISH_REASONS, MODES, ORIGINS, RULES
from specpipe.rpc.v1 import common_pb2, generate_pb2

MAX_COUNT = 2**32 - 1
"""Counts are sums of what workers say, and the wire has no room for more."""


def question_from_pb(request: generate_pb2.GenerateRequest) -> Question:
    """Raises InvalidRequestError for an enum value that we do not know."""
    sampling, speculation = request.sampling, request.speculation
    return Question(
        request_id=request.request_id,
        model=request.model,
        prompt=_prompt_from_pb(request),
        temperature=_optional(sampling, "temperature"),
        top_p=_optional(sampling, "top_p"),
        top_k=_optional(sampling, "top_k"),
        min_p=_optional(sampling, "min_p"),
        seed=_optional(sampling, "seed"),
        max_tokens=_optional(sampling, "max_tokens"),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        mode=MODES.from_pb(speculation.mode) if speculation.mode else None,
        rule=RULES.from_pb(speculation.rule) if speculation.rule else None,
        num_speculative_tokens=_optional(speculation, "num_speculative_tokens"),
        trace=request.trace,
    )


def event_to_pb(event: AnswerEvent) -> generate_pb2.GenerateResponse:
    match event:
        case Started():
            return generate_pb2.GenerateResponse(started=_started_to_pb(event))
        case Chunk():
            chunk = generate_pb2.Chunk(
                token_ids=event.token_ids,
                text=event.text,
                origins=map(ORIGINS.to_pb, event.origins),
                round=min(event.round, MAX_COUNT),
                text_lengths=event.text_lengths,
            )
            return generate_pb2.GenerateResponse(chunk=chunk)
        case Finished():
            return generate_pb2.GenerateResponse(finished=_finished_to_pb(event))


def _prompt_from_pb(request: generate_pb2.GenerateRequest) -> Prompt | None:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "prompt_token_ids":
            return tuple(request.prompt_token_ids.ids)
        case "chat":
            return tuple(ChatMessage(role=message.role, content=message.content) for message in request.chat.messages)
        case _:
            return None


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _started_to_pb(event: Started) -> generate_pb2.Started:
    return generate_pb2.Started(
        request_id=event.request_id,
        model=event.model,
        prompt_tokens=event.prompt_tokens,
        seed=event.seed,
        rule=common_pb2.RULE_UNSPECIFIED if event.rule is None else RULES.to_pb(event.rule),
    )


def _finished_to_pb(event: Finished) -> generate_pb2.Finished:
    timing = event.timing
    return generate_pb2.Finished(
        finish_reason=FINISH_REASONS.to_pb(event.finish_reason),
        usage=generate_pb2.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            cached_prompt_tokens=event.cached_prompt_tokens and min(event.cached_prompt_tokens, MAX_COUNT),
        ),
        timing=generate_pb2.Timing(ttft_ms=timing.ttft_ms, tpot_ms=timing.tpot_ms, total_ms=timing.total_ms),
        speculation=_report_to_pb(event.speculation),
    )


def _report_to_pb(report: SpeculationStats) -> generate_pb2.SpeculationStats:
    values = {name: getattr(report, name) for name in report.__slots__ if name not in ("mode", "rule")}
    counts = {name: min(value, MAX_COUNT) for name, value in values.items() if isinstance(value, int)}
    values |= counts
    return generate_pb2.SpeculationStats(mode=MODES.to_pb(report.mode), rule=RULES.to_pb(report.rule), **values)
