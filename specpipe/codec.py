"""Between specpipe.types and the protobuf messages of the worker streams, both ways.

Owns: the translation and the checks that need no session state. Besides service and client modules only codecs see
protobuf: this one batches and what is in them, `codec_hello` and `codec_reports` those. Must not know: grpc, asyncio,
what a session does with a message.

`*_to_pb` takes values of our own and raises nothing. `*_from_pb` takes what a peer sent: it raises InvalidRequestError
with a sentence that names the session and the field, before any large value is copied. `batch_from_pb` raises nothing:
a message that is wrong becomes a Rejection, and the others are delivered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specpipe.codec_enums import ERROR_CODES, FINISH_REASONS, MODES, ORIGINS, RULES
from specpipe.codec_fields import check_duration, check_length, values_of
from specpipe.codec_hello import heartbeat_from_pb, heartbeat_to_pb
from specpipe.codec_reports import report_from_pb, report_to_pb
from specpipe.errors import InvalidRequestError
from specpipe.extensions import MAX_EXTENSION_NODES, MAX_PROPOSAL_TOKENS, check_proposals, check_trie
from specpipe.reports import Report
from specpipe.rpc.v1 import common_pb2, worker_pb2
from specpipe.types import (
    Batch,
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    ModelInfo,
    NeedTokens,
    Open,
    Proposal,
    RoundStats,
    SamplingParams,
    SessionMessage,
    SpeculationParams,
    StopRules,
)

MAX_TEXT_LENGTH = 4096
"""Characters of an error message or a reason; longer ones are cut when sent."""

MAX_RELAYED_BYTES = 2**19
"""Of an extension that is passed on unread: an honest one of 256 nodes with all their proposals has a quarter of it."""

_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a receiver can take; learned from the model that both ends serve."""

    vocab_size: int = 2**32  # token ids are below it
    max_context: int = 2**32 - 1  # tokens of a sequence
    relays_extensions: bool = False  # they are passed on, and their nodes are the next receiver's to check

    @classmethod
    def of(cls, model: ModelInfo | None, *, relays_extensions: bool = False) -> Limits:
        if model is None:
            return cls(relays_extensions=relays_extensions)
        return cls(vocab_size=model.vocab_size, max_context=model.max_context, relays_extensions=relays_extensions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedExtension(Extension):
    """An extension on its way through: its nodes stay in `message`, unread, and only there."""

    message: worker_pb2.Extension = field(compare=False)
    num_bytes: int = field(default=0, compare=False)

    @property
    def num_nodes(self) -> int:
        return len(self.message.tokens)

    def read(self) -> Extension:
        """With its nodes. Raises InvalidRequestError if they are not right."""
        return extension_from_pb(self.message, Limits())


@dataclass(frozen=True, slots=True)
class Rejection:
    """A message that was wrong: which session it named, what kind it was, and why it cannot be used."""

    session: int
    kind: type[SessionMessage]
    error: InvalidRequestError


# Batches


def batch_to_pb(batch: Batch) -> worker_pb2.Batch:
    return worker_pb2.Batch(
        sequence=batch.sequence,
        opens=map(open_to_pb, batch.opens),
        extensions=map(extension_to_pb, batch.extensions),
        commits=map(commit_to_pb, batch.commits),
        need_tokens=(worker_pb2.NeedTokens(session=need.session, have=need.have) for need in batch.need_tokens),
        failures=map(failed_to_pb, batch.failures),
        closes=(
            worker_pb2.Close(session=close.session, reason=close.reason[:MAX_TEXT_LENGTH]) for close in batch.closes
        ),
        closed=(worker_pb2.Closed(session=closed.session, length=closed.length) for closed in batch.closed),
        heartbeat=None if batch.heartbeat is None else heartbeat_to_pb(batch.heartbeat),
        reports=map(report_to_pb, batch.reports),
    )


def batch_from_pb(batch_pb: worker_pb2.Batch, limits: Limits) -> tuple[Batch, list[Rejection]]:
    """The messages that are right, and why each of the others is not."""
    rejected: list[Rejection] = []

    def decoded(
        kind: Callable[..., Any], messages_pb: Iterable[Any], decode: Callable[..., _Message]
    ) -> tuple[_Message, ...]:
        messages = []
        for message_pb in messages_pb:
            try:
                messages.append(decode(message_pb, limits))
            except InvalidRequestError as error:
                named = InvalidRequestError(f"session {message_pb.session}: {kind.__name__}: {error}")
                rejected.append(Rejection(message_pb.session, kind, named))  # type: ignore[arg-type]
        return tuple(messages)

    batch = Batch(
        sequence=batch_pb.sequence,
        opens=decoded(Open, batch_pb.opens, open_from_pb),
        extensions=decoded(
            Extension, batch_pb.extensions, relayed_from_pb if limits.relays_extensions else extension_from_pb
        ),
        commits=decoded(Commit, batch_pb.commits, commit_from_pb),
        need_tokens=tuple(NeedTokens(session=need.session, have=need.have) for need in batch_pb.need_tokens),
        failures=decoded(Failed, batch_pb.failures, failed_from_pb),
        closes=tuple(Close(session=close.session, reason=close.reason[:MAX_TEXT_LENGTH]) for close in batch_pb.closes),
        closed=tuple(Closed(session=closed.session, length=closed.length) for closed in batch_pb.closed),
        heartbeat=heartbeat_from_pb(batch_pb.heartbeat) if batch_pb.HasField("heartbeat") else None,
        reports=decoded(Report, batch_pb.reports, lambda report_pb, _: report_from_pb(report_pb)),
    )
    return batch, rejected


# Messages of a session


def open_to_pb(message: Open) -> worker_pb2.Open:
    return worker_pb2.Open(
        session=message.session,
        request_id=message.request_id,
        tokens=message.tokens,
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=common_pb2.ResolvedSampling(**values_of(message.sampling)),
        stops=common_pb2.StopRules(**values_of(message.stops)),
        speculation=speculation_to_pb(message.speculation),
        remaining_ms=message.remaining_ms,
        priority=message.priority,
        trace_context=message.trace_context,
        adapter=message.adapter,
        vocab_size=message.vocab_size,
        wants_reports=message.wants_reports,
    )


def open_from_pb(open_pb: worker_pb2.Open, limits: Limits) -> Open:
    for name in ("request_id", "trace_context", "adapter"):
        check_length(name, getattr(open_pb, name))
    if not 1 <= open_pb.num_prompt_tokens <= len(open_pb.tokens):
        raise InvalidRequestError(f"num_prompt_tokens is {open_pb.num_prompt_tokens} of {len(open_pb.tokens)} tokens")
    remaining_ms = open_pb.remaining_ms if open_pb.HasField("remaining_ms") else None
    if remaining_ms is not None and math.isnan(remaining_ms):
        raise InvalidRequestError("remaining_ms is not a number")
    return Open(
        session=open_pb.session,
        request_id=open_pb.request_id,
        tokens=_tokens("tokens", open_pb.tokens, limits),
        num_prompt_tokens=open_pb.num_prompt_tokens,
        sampling=sampling_from_pb(open_pb.sampling),
        stops=stops_from_pb(open_pb.stops, limits),
        speculation=speculation_from_pb(open_pb.speculation),
        remaining_ms=remaining_ms,
        priority=open_pb.priority,
        trace_context=open_pb.trace_context,
        adapter=open_pb.adapter,
        vocab_size=open_pb.vocab_size,
        wants_reports=open_pb.wants_reports,
    )


def sampling_from_pb(sampling_pb: common_pb2.ResolvedSampling) -> SamplingParams:
    for name, low, high in (("temperature", 0.0, math.inf), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
        value = getattr(sampling_pb, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequestError(f"{name} is {value}")
    if sampling_pb.top_p == 0.0:
        raise InvalidRequestError("top_p is 0")
    return SamplingParams(**values_of(sampling_pb, SamplingParams))


def stops_from_pb(stops_pb: common_pb2.StopRules, limits: Limits) -> StopRules:
    return StopRules(
        eos_token_ids=_tokens("eos_token_ids", stops_pb.eos_token_ids, limits),
        stop_token_ids=_tokens("stop_token_ids", stops_pb.stop_token_ids, limits),
        ignore_eos=stops_pb.ignore_eos,
        min_length=stops_pb.min_length,
        max_length=stops_pb.max_length,
    )


def speculation_to_pb(speculation: SpeculationParams) -> common_pb2.ResolvedSpeculation:
    return common_pb2.ResolvedSpeculation(
        mode=MODES.to_pb(speculation.mode),
        rule=RULES.to_pb(speculation.rule),
        num_speculative_tokens=speculation.num_speculative_tokens,
        drafter=speculation.drafter,
    )


def speculation_from_pb(speculation_pb: common_pb2.ResolvedSpeculation) -> SpeculationParams:
    check_length("drafter", speculation_pb.drafter)
    has_limit = speculation_pb.HasField("num_speculative_tokens")
    return SpeculationParams(
        mode=MODES.from_pb(speculation_pb.mode),
        rule=RULES.from_pb(speculation_pb.rule),
        num_speculative_tokens=speculation_pb.num_speculative_tokens if has_limit else None,
        drafter=speculation_pb.drafter,
    )


def extension_to_pb(extension: Extension) -> worker_pb2.Extension:
    if isinstance(extension, RelayedExtension):
        extension.message.session, extension.message.draft_step = extension.session, extension.draft_step
        return extension.message
    proposals = [worker_pb2.Proposal(**values_of(proposal)) for proposal in extension.proposals]
    values = values_of(extension)
    del values["arrived_s"]
    return worker_pb2.Extension(**values | {"proposals": proposals})


def relayed_from_pb(extension_pb: worker_pb2.Extension, _: Limits) -> RelayedExtension:
    """Bounded in whatever it carries, known to us or not: it is somebody else's word in a message of ours."""
    _check_extension_size(extension_pb)
    num_bytes = extension_pb.ByteSize()
    if num_bytes > MAX_RELAYED_BYTES:
        raise InvalidRequestError(f"its {num_bytes} bytes are more than {MAX_RELAYED_BYTES}")
    return RelayedExtension(
        session=extension_pb.session,
        base=extension_pb.base,
        parents=(),
        tokens=(),
        confidences=(),
        is_exhausted=extension_pb.is_exhausted,
        drafter=extension_pb.drafter,
        draft_step=extension_pb.draft_step,
        draft_step_ms=extension_pb.draft_step_ms,
        draft_share_ms=extension_pb.draft_share_ms,
        message=extension_pb,
        num_bytes=num_bytes,
    )


def extension_from_pb(extension_pb: worker_pb2.Extension, limits: Limits) -> Extension:
    """Checked: same lengths, parents earlier than their node, ids in the vocabulary, confidences in [0, 1], proposals
    that are distributions and whose sampled child is among the nodes."""
    num_nodes = _check_extension_size(extension_pb)
    parents, confidences = tuple(extension_pb.parents), tuple(extension_pb.confidences)
    check_trie(parents, confidences)
    extension = Extension(
        session=extension_pb.session,
        base=extension_pb.base,
        parents=parents,
        tokens=_tokens("tokens", extension_pb.tokens, Limits(vocab_size=limits.vocab_size)),  # a tree may be wider
        confidences=confidences,
        is_exhausted=extension_pb.is_exhausted,
        drafter=extension_pb.drafter,
        draft_step=extension_pb.draft_step,
        draft_step_ms=extension_pb.draft_step_ms,
        draft_share_ms=extension_pb.draft_share_ms,
        proposals=_proposals(extension_pb.proposals, num_nodes),
    )
    check_proposals(extension, limits.vocab_size)
    return extension


def _check_extension_size(extension_pb: worker_pb2.Extension) -> int:
    """The number of nodes."""
    num_nodes = len(extension_pb.tokens)
    if num_nodes > MAX_EXTENSION_NODES:
        raise InvalidRequestError(f"{num_nodes} nodes are more than {MAX_EXTENSION_NODES}")
    if not len(extension_pb.parents) == len(extension_pb.confidences) == num_nodes:
        raise InvalidRequestError("parents, tokens and confidences differ in length")
    check_length("drafter", extension_pb.drafter)
    for name in ("draft_step_ms", "draft_share_ms"):
        check_duration(name, getattr(extension_pb, name))
    return num_nodes


def _proposals(proposals_pb: Sequence[worker_pb2.Proposal], num_nodes: int) -> tuple[Proposal, ...]:
    """Not yet checked but for their size."""
    if len(proposals_pb) > num_nodes:
        raise InvalidRequestError(f"{len(proposals_pb)} proposals for {num_nodes} nodes")
    if any(max(len(pb.tokens), len(pb.probs)) > MAX_PROPOSAL_TOKENS for pb in proposals_pb):
        raise InvalidRequestError(f"a proposal has more than {MAX_PROPOSAL_TOKENS} tokens")
    return tuple(
        Proposal(parent=p.parent, tokens=tuple(p.tokens), probs=tuple(p.probs), index=p.index) for p in proposals_pb
    )


def commit_to_pb(commit: Commit) -> worker_pb2.Commit:
    return worker_pb2.Commit(
        session=commit.session,
        round=commit.round,
        base=commit.base,
        tokens=commit.tokens,
        origins=map(ORIGINS.to_pb, commit.origins),
        next_budget=commit.next_budget,
        finish_reason=(
            FINISH_REASONS.to_pb(commit.finish_reason) if commit.finish_reason else common_pb2.FINISH_REASON_UNSPECIFIED
        ),
        verified_draft_steps=commit.verified_draft_steps,
        stats=worker_pb2.RoundStats(**values_of(commit.stats)),
    )


def commit_from_pb(commit_pb: worker_pb2.Commit, limits: Limits) -> Commit:
    """Checked: one origin a token, ids in the vocabulary, within the context."""
    if len(commit_pb.origins) != len(commit_pb.tokens):
        raise InvalidRequestError(f"{len(commit_pb.tokens)} tokens have {len(commit_pb.origins)} origins")
    if commit_pb.base + len(commit_pb.tokens) > limits.max_context:
        raise InvalidRequestError(f"tokens end after the context of {limits.max_context}")
    return Commit(
        session=commit_pb.session,
        round=commit_pb.round,
        base=commit_pb.base,
        tokens=_tokens("tokens", commit_pb.tokens, limits),
        origins=tuple(map(ORIGINS.from_pb, commit_pb.origins)),
        next_budget=commit_pb.next_budget,
        finish_reason=FINISH_REASONS.from_pb(commit_pb.finish_reason) if commit_pb.finish_reason else None,
        verified_draft_steps=tuple(commit_pb.verified_draft_steps),
        stats=stats_from_pb(commit_pb.stats),
    )


def stats_from_pb(stats_pb: worker_pb2.RoundStats) -> RoundStats:
    for name in ("exposed_ms", "step_ms", "gap_ms"):
        check_duration(name, getattr(stats_pb, name))
    return RoundStats(**values_of(stats_pb, RoundStats))


def failed_to_pb(failed: Failed) -> worker_pb2.Failed:
    return worker_pb2.Failed(
        session=failed.session,
        code=ERROR_CODES.to_pb(failed.code),
        message=failed.message[:MAX_TEXT_LENGTH],
        is_retryable=failed.is_retryable,
    )


def failed_from_pb(failed_pb: worker_pb2.Failed, _: Limits) -> Failed:
    return Failed(
        session=failed_pb.session,
        code=ERROR_CODES.from_pb(failed_pb.code),
        message=failed_pb.message[:MAX_TEXT_LENGTH],
        is_retryable=failed_pb.is_retryable,
    )


# Checks


def _tokens(name: str, ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    if len(ids) > limits.max_context:
        raise InvalidRequestError(f"{name}: {len(ids)} ids are more than the context of {limits.max_context}")
    largest = max(ids, default=0)
    if largest >= limits.vocab_size:
        raise InvalidRequestError(f"{name}: id {largest} is not below {limits.vocab_size}, the size of the vocabulary")
    return tuple(ids)
