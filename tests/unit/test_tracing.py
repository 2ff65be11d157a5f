"""Which requests are traced, what is kept of them, and who gets their spans."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from trace_story import Exported, Story, a_request

from coordinator.events import Kind
from coordinator.requests import Question
from coordinator.tracing import MAX_TRACES, Tracing
from specpipe.config import TelemetryConfig
from specpipe.reports import Report
from specpipe.spans import Span
from specpipe.telemetry.propagation import current_context, is_sampled_by_ratio, read_context, traceparent

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = ("traceparent", f"00-{TRACE}-{PARENT}-01")
NOT_SAMPLED = ("traceparent", f"00-{TRACE}-{PARENT}-00")


def a_tracing(level: Any = "round", sample: float | None = None) -> Tracing:
    return Tracing(TelemetryConfig(trace_level=level, trace_sample=sample), random=Random(1), exporter=Exported())


# The caller's context


def test_the_callers_trace_goes_on() -> None:
    story = Story(metadata=(SAMPLED, ("tracestate", "vendor=1,other=2"), ("authorization", "x")))
    story.run(5.0)
    story.cancel()
    story.trace.complete()
    (generate,) = story.named("generate")
    assert f"{generate.trace_id:032x}" == TRACE
    assert f"{generate.parent_id:016x}" == PARENT
    assert generate.trace_state == "vendor=1,other=2"


def test_workers_are_told_the_trace_of_the_request() -> None:
    story = Story(metadata=(SAMPLED,))
    story.admit()
    (context,) = {opened.trace_context for opened in story.opened}
    assert context.startswith(f"00-{TRACE}-")
    assert context.endswith("-01")
    assert PARENT not in context
    assert all(opened.wants_reports for opened in story.opened)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{PARENT}",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        "x" * 100_000,
    ],
)
def test_a_malformed_context_begins_a_new_trace(value: str) -> None:
    assert read_context([("traceparent", value)]) is None
    trace = a_tracing().begin(Question(), [("traceparent", value), ("tracestate", "a=1")], received_ms=0.0)
    assert trace is not None
    assert TRACE not in trace.context


def test_a_malformed_state_is_left_out_and_the_trace_goes_on() -> None:
    caller = read_context([SAMPLED, ("tracestate", "=,,=x")])
    assert caller is not None
    assert (f"{caller.trace_id:032x}", caller.trace_state) == (TRACE, "")


def test_two_parents_are_none() -> None:
    assert read_context([SAMPLED, SAMPLED]) is None
    assert read_context([SAMPLED, ("traceparent", "nonsense")]) is None


def test_malformed_headers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for value in ("=,,=x", "a=b\n", "k" * 10_000, ",".join(f"k{number}=1" for number in range(40))):
        assert read_context([SAMPLED, ("tracestate", value)]) is not None
    assert read_context([("traceparent", "x" * 10_000)]) is None
    assert caplog.messages == []


def test_states_in_several_headers_are_one() -> None:
    caller = read_context([SAMPLED, ("tracestate", "a=1"), ("tracestate", "b=2")])
    assert caller is not None
    assert caller.trace_state == "a=1,b=2"


def test_a_context_that_was_written_is_read_again() -> None:
    caller = read_context([("traceparent", traceparent(int(TRACE, 16), int(PARENT, 16), is_sampled=False))])
    assert caller is not None
    assert (caller.trace_id, caller.span_id, caller.is_sampled) == (int(TRACE, 16), int(PARENT, 16), False)


def test_the_current_span_of_a_caller_goes_with_its_question() -> None:
    from opentelemetry.sdk.trace import TracerProvider

    assert current_context() == []
    with TracerProvider(shutdown_on_exit=False).get_tracer("test").start_as_current_span("ask") as span:
        context = dict(current_context())
    caller = read_context(context.items())
    assert caller is not None
    assert (caller.trace_id, caller.span_id) == (span.get_span_context().trace_id, span.get_span_context().span_id)


# Sampling


@pytest.mark.parametrize("sample", [0.0, 1.0])
def test_the_callers_decision_goes_before_the_ratio(sample: float) -> None:
    tracing = a_tracing(sample=sample)
    assert tracing.begin(Question(), [NOT_SAMPLED], received_ms=0.0) is None
    assert tracing.begin(Question(), [SAMPLED], received_ms=0.0) is not None


def test_without_a_caller_the_ratio_decides() -> None:
    tracing = a_tracing(sample=0.25)
    taken = [tracing.begin(Question(), (), received_ms=0.0) is not None for _ in range(2000)]
    assert 430 < sum(taken) < 570


@pytest.mark.parametrize("ratio", [0.0, 1e-9, 0.1, 0.5, 1.0])
def test_the_ratio_is_that_of_opentelemetry(ratio: float) -> None:
    random, sampler = Random(2), TraceIdRatioBased(ratio)
    for _ in range(500):
        trace_id = random.getrandbits(128)
        theirs = sampler.should_sample(None, trace_id, "x").decision is Decision.RECORD_AND_SAMPLE
        assert is_sampled_by_ratio(trace_id, ratio) is theirs


def without_exporter(level: Any = "round", sample: float | None = None) -> Tracing:
    return Tracing(TelemetryConfig(trace_level=level, trace_sample=sample), random=Random(1))


@pytest.mark.parametrize("metadata", [(), (SAMPLED,), (NOT_SAMPLED,)])
@pytest.mark.parametrize("level", ["off", "request", "round", "debug"])
def test_where_nobody_takes_spans_a_request_is_not_laid_out(level: Any, metadata: Any) -> None:
    tracing = without_exporter(level)
    assert tracing.begin(Question(), metadata, received_ms=0.0) is None
    assert tracing.num_open == 0


def test_where_nobody_takes_spans_what_is_asked_for_or_watched_is_laid_out() -> None:
    tracing = without_exporter()
    asked = tracing.begin(Question(trace=True), [SAMPLED], received_ms=0.0)
    assert asked is not None
    assert asked.wants_reports
    assert asked.context.endswith("-00"), "nobody is to export it"
    stop = tracing.subscribe(lambda spans: None)
    watched = tracing.begin(Question(), (), received_ms=0.0)
    assert watched is not None
    assert watched.wants_reports
    stop()
    assert tracing.begin(Question(), (), received_ms=0.0) is None


def test_a_share_that_is_asked_for_is_kept_without_an_exporter() -> None:
    tracing = without_exporter(sample=1.0)
    one_trace(tracing, "r")
    assert tracing.find("r") is not None
    assert tracing.begin(Question(), [NOT_SAMPLED], received_ms=0.0) is None
    some = without_exporter(sample=0.25)
    assert 430 < sum(some.begin(Question(), (), received_ms=0.0) is not None for _ in range(2000)) < 570
    assert without_exporter(sample=0.0).begin(Question(), [SAMPLED], received_ms=0.0) is None
    assert without_exporter("request", sample=1.0).begin(Question(), (), received_ms=0.0) is None, "too little to keep"


def test_level_off_traces_nothing_but_what_is_asked_for() -> None:
    tracing = a_tracing("off")
    assert tracing.begin(Question(), [SAMPLED], received_ms=0.0) is None
    asked = tracing.begin(Question(trace=True), [SAMPLED], received_ms=0.0)
    assert asked is not None
    assert asked.wants_reports
    assert asked.context.endswith("-00"), "nobody is to export it"


def test_what_is_asked_for_is_kept_and_not_exported_if_it_is_not_sampled() -> None:
    story = Story(question=Question(trace=True), metadata=(NOT_SAMPLED,))
    story.admit()
    story.verify(3.0, 5.0, base=3)
    story.run(20.0)
    story.cancel()
    story.close()
    assert story.named("verify")
    assert not story.exported.spans


@pytest.mark.parametrize("level", ["off", "request", "round"])
def test_a_level_bounds_what_is_exported_and_not_what_is_kept(level: Any) -> None:
    story = Story(telemetry=TelemetryConfig(trace_level=level), question=Question(trace=True))
    story.admit()
    story.verify(3.0, 5.0, base=3)
    story.run(20.0)
    story.cancel()
    story.close()
    exported = {span.name for span in story.exported.spans}
    assert {span.name for span in story.spans} > {"generate", "round", "verify"}
    assert ("verify" in exported) is (level == "round")
    assert ("generate" in exported) is (level != "off")


# Who looks on


def test_while_somebody_looks_on_every_request_is_laid_out() -> None:
    tracing = a_tracing("off")
    seen: list[Span] = []
    stop = tracing.subscribe(seen.extend)
    assert tracing.is_watched
    trace = tracing.begin(Question(), [NOT_SAMPLED], received_ms=0.0)
    assert trace is not None
    assert trace.wants_reports
    trace.refuse(ValueError(), 1.0)
    assert [span.name for span in seen] == ["generate"]
    stop()
    stop()
    assert not tracing.is_watched
    assert tracing.begin(Question(), (), received_ms=0.0) is None


def test_a_sink_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    story = Story()
    seen: list[Span] = []

    def fail(spans: Any) -> None:
        raise ValueError(spans)

    story.tracing.subscribe(fail)
    story.tracing.subscribe(seen.extend)
    story.admit()
    assert [span.name for span in seen] == ["queue"]
    assert "a sink of spans failed" in caplog.text


# What is kept


def one_trace(tracing: Tracing, request_id: str, num_rounds: int = 1, metadata: Any = ()) -> None:
    story = Story(request=a_request(request_id=request_id))
    story.tracing = tracing
    story.trace = tracing.begin(Question(), metadata, received_ms=0.0) or pytest.fail("it is traced")
    story.trace.submit(story.machine, 1.0)
    story.admit()
    for i in range(num_rounds):
        story.verify(3.0 + i, 1.0, base=3 + i)
    story.run(10.0 + num_rounds)
    story.cancel()
    story.close()


def test_the_last_traces_are_kept() -> None:
    tracing = a_tracing()
    for i in range(MAX_TRACES + 3):
        one_trace(tracing, f"r{i}")
    assert [tracing.find(f"r{i}") is None for i in range(5)] == [True, True, True, False, False]
    last = tracing.find(f"r{MAX_TRACES + 2}")
    assert last is not None
    assert last.is_complete


def test_large_traces_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.tracing.MAX_SPANS", 100)
    tracing = a_tracing()
    for i in range(8):
        one_trace(tracing, f"r{i}", num_rounds=15)
    kept = [found for i in range(8) if (found := tracing.find(f"r{i}")) is not None]
    assert 30 < sum(len(found.spans) for found in kept) <= 100
    assert tracing.find("r7") is not None


def test_one_endless_answer_is_kept_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.tracing.MAX_SPANS_OF_ONE", 20)
    tracing = a_tracing()
    one_trace(tracing, "r", num_rounds=50)
    found = tracing.find("r")
    assert found is not None
    assert len(found.spans) == 20
    assert found.is_complete


def test_an_id_that_is_used_again_finds_the_newer_request() -> None:
    tracing = a_tracing()
    one_trace(tracing, "r", 1)
    one_trace(tracing, "r", 3)
    found = tracing.find("r")
    assert found is not None
    assert sum(span.name == "verify" for span in found.spans) == 3


def test_the_id_of_a_trace_finds_its_newest_request() -> None:
    tracing = a_tracing()
    one_trace(tracing, "first", metadata=(SAMPLED,))
    one_trace(tracing, "second", 3, metadata=(SAMPLED,))
    one_trace(tracing, "other")
    for written in (TRACE, TRACE.upper()):
        assert tracing.find(written) == tracing.find("second")
    for unknown in ("1" * 32, TRACE[:-1], TRACE + "0", f"0x{TRACE[2:]}", ""):
        assert tracing.find(unknown) is None
    one_trace(tracing, TRACE, 2)
    named = tracing.find(TRACE)
    assert named is not None
    assert f"{named.trace_id:032x}" != TRACE, "a request's own id goes before"


def test_what_is_known_of_a_live_request_is_found_by_start() -> None:
    story = Story()
    story.admit()
    for i in range(3):
        story.verify(3.0 + 5 * i, 5.0, base=3 + i)
    story.run(20.0)
    found = story.tracing.find("r")
    assert found is not None
    assert not found.is_complete
    assert [span.name for span in found.spans] == ["tokenize", "queue", "prefill", "verify", "verify", "verify"]


def test_numbers_of_exported_and_lost_spans_are_told() -> None:
    tracing = Tracing(TelemetryConfig())
    assert (tracing.num_exported, dict(tracing.num_dropped), tracing.num_lost_records) == (0, {}, 0)
    story = Story()
    story.admit()
    target = story.of(Kind.TARGET)
    story.trace.hear(Report(session=target.session, num_lost=7), story.now_ms)
    assert story.tracing.num_lost_records == 7
