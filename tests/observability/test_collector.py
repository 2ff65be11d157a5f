"""What comes out of a real collector: the spans of every request, whole, in their places, from every process.

Jaeger cannot be had here; this is what it would be given.
"""

from __future__ import annotations

from collections import Counter

import pytest
from observed import Observed
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_receiver import ReceivedSpan
from prometheus_server import wait_for

PARENTS = {
    "queue": {"generate"},
    "tokenize": {"generate"},
    "prefill": {"generate"},
    "round": {"generate"},
    "verify": {"round"},
    "draft": {"round", "generate"},  # generate: the answer ended before the round in which it began
}
SERVICES = {
    "generate": {"specpipe-coordinator"},
    "queue": {"specpipe-coordinator"},
    "tokenize": {"specpipe-coordinator"},
    "prefill": {"specpipe-target-worker", "specpipe-draft-worker"},
    "round": {"specpipe-coordinator"},
    "verify": {"specpipe-target-worker"},
    "draft": {"specpipe-draft-worker"},
}


@pytest.fixture(scope="module")
def traces(observed: Observed) -> dict[str, list[ReceivedSpan]]:
    """By request id, once the spans of all requests are through."""
    if observed.no_collector:
        pytest.skip(observed.no_collector)
    expected = [*observed.answers, observed.cancelled]
    wait_for("all traces", lambda: all(observed.trace_of(i) for i in expected), observed.service.log)
    return {request_id: observed.trace_of(request_id) for request_id in expected}


def named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == name]


def service_of(span: ReceivedSpan) -> str:
    return str(span.resource["service.name"])


def overlap(one: ReceivedSpan, other: ReceivedSpan) -> bool:
    starts = (one.pb.start_time_unix_nano, other.pb.start_time_unix_nano)
    return max(starts) < min(one.pb.end_time_unix_nano, other.pb.end_time_unix_nano)


def test_each_request_is_one_trace_of_its_own(traces: dict[str, list[ReceivedSpan]]) -> None:
    assert len({span.trace_id for spans in traces.values() for span in spans}) == len(traces)
    for spans in traces.values():
        assert Counter(span.name for span in spans)["generate"] == 1
        assert len({span.span_id for span in spans}) == len(spans)


def test_every_span_has_its_parent_in_the_trace(traces: dict[str, list[ReceivedSpan]]) -> None:
    for spans in traces.values():
        by_id = {span.span_id: span for span in spans}
        (root,) = named(spans, "generate")
        assert root.parent_id == ""
        for span in spans:
            if span is not root:
                assert by_id[span.parent_id].name in PARENTS[span.name], span.name


def test_every_process_is_there_and_spans_are_of_the_process_that_did_the_work(
    traces: dict[str, list[ReceivedSpan]],
) -> None:
    spans = [span for spans in traces.values() for span in spans]
    assert {service_of(span) for span in spans} == set().union(*SERVICES.values())
    for span in spans:
        assert service_of(span) in SERVICES[span.name], span.name
        is_root = span.name == "generate"
        assert span.pb.kind == (Span.SPAN_KIND_SERVER if is_root else Span.SPAN_KIND_INTERNAL)


def test_every_round_has_its_verification(observed: Observed, traces: dict[str, list[ReceivedSpan]]) -> None:
    for request_id, answer in observed.answers.items():
        assert answer.finished is not None
        rounds, verifies = named(traces[request_id], "round"), named(traces[request_id], "verify")
        delivered = [span for span in rounds if "specpipe.num_verified" in span.attributes]
        assert len(delivered) >= answer.finished.speculation.rounds > 0
        assert {span.parent_id for span in verifies} == {span.span_id for span in delivered}


def test_verifications_are_linked_to_the_drafts_that_they_verified(traces: dict[str, list[ReceivedSpan]]) -> None:
    num_linked = 0
    for spans in traces.values():
        drafts = {span.span_id for span in named(spans, "draft")}
        for verify in named(spans, "verify"):
            assert set(verify.links) <= drafts
            num_linked += bool(verify.links)
    assert num_linked > 0


def test_drafting_runs_while_the_target_verifies(observed: Observed, traces: dict[str, list[ReceivedSpan]]) -> None:
    pairs = [
        (verify, draft)
        for request_id in observed.pipelined
        for verify in named(traces[request_id], "verify")
        for draft in named(traces[request_id], "draft")
    ]
    assert any(overlap(verify, draft) for verify, draft in pairs)


def test_times_are_those_of_one_clock_and_children_lie_within(traces: dict[str, list[ReceivedSpan]]) -> None:
    for spans in traces.values():
        by_id = {span.span_id: span for span in spans}
        for span in spans:
            assert 0 < span.pb.start_time_unix_nano <= span.pb.end_time_unix_nano
        for verify in named(spans, "verify"):
            parent = by_id[verify.parent_id]
            assert parent.pb.start_time_unix_nano <= verify.pb.start_time_unix_nano
            assert verify.pb.end_time_unix_nano <= parent.pb.end_time_unix_nano


def test_statuses_tell_who_was_left(observed: Observed, traces: dict[str, list[ReceivedSpan]]) -> None:
    for request_id in observed.answers:
        assert not any(span.pb.status.code == Status.STATUS_CODE_ERROR for span in traces[request_id])
    (left,) = named(traces[observed.cancelled], "generate")
    assert "cancel" in left.events


def test_metrics_come_through_as_well(observed: Observed, traces: dict[str, list[ReceivedSpan]]) -> None:
    wanted = {"specpipe.rounds", "specpipe.step.duration", "gen_ai.server.time_to_first_token"}
    wait_for("metrics", lambda: wanted <= observed.metrics.names, observed.service.log)
