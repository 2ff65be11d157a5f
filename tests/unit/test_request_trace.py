"""What a request's trace says: which spans, whose children, linked to what, and that each that began has ended."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from trace_story import PROMPT, Story, a_hit_and_miss_story, a_request

from coordinator.events import Cause, Kind, Received
from coordinator.requests import Question
from coordinator.trace_rounds import MAX_EVENTS, MAX_LINKS
from specpipe.codec_trace import trace_from_pb, trace_to_pb
from specpipe.config import TelemetryConfig
from specpipe.errors import ErrorCode, InvalidRequestError
from specpipe.reports import MAX_REPORT_RECORDS, Report, SessionEvent, SessionEventKind, StepKind, StepRecord
from specpipe.spans import Role, Span, SpanKind
from specpipe.telemetry.codec_otlp import export_request
from specpipe.types import Closed, Commit, Extension, Failed, FinishReason, Origin

GOLDEN = Path(__file__).parent / "golden" / "trace.json"


def parents(spans: tuple[Span, ...]) -> dict[int, Span]:
    return {span.span_id: span for span in spans}


def round_of(span: Span, spans: tuple[Span, ...]) -> Any:
    """The number of the round that is its parent."""
    return parents(spans)[span.parent_id].attributes.get("specpipe.round")


def sums(story: Story, name: str) -> float:
    return sum(float(span.attributes[f"specpipe.{name}"]) for span in story.named("round"))  # type: ignore[arg-type]


def end(story: Story) -> Story:
    story.run(story.now_ms + 10)
    story.close()
    assert story.trace.is_complete
    assert story.tracing.num_open == 0
    return story


def finish(story: Story, base: int) -> Story:
    story.verify(story.now_ms + 1, 5.0, base=base, finish_reason=FinishReason.LENGTH)
    return end(story)


def test_each_round_has_its_verification_and_each_draft_step_is_in_the_round_in_which_it_began() -> None:
    story = finish(a_hit_and_miss_story(), 10)
    spans = story.spans
    assert Counter(span.name for span in spans) == {
        "generate": 1,
        "tokenize": 1,
        "queue": 1,
        "prefill": 2,
        "round": 5,
        "verify": 5,
        "draft": 5,
    }
    assert [round_of(span, spans) for span in story.named("verify")] == [1, 2, 3, 4, 5]
    assert [round_of(span, spans) for span in story.named("draft")] == [1, 1, 2, 3, 4]
    for child in spans:
        if child.name in ("verify", "draft"):
            parent = parents(spans)[child.parent_id]
            assert parent.start_unix_nanos <= child.start_unix_nanos < parent.end_unix_nanos


def test_a_verification_is_linked_to_the_draft_steps_whose_nodes_it_verified() -> None:
    story = finish(a_hit_and_miss_story(), 10)
    steps = {span.span_id: span.attributes["specpipe.step"] for span in story.named("draft")}
    assert [[steps[link] for link in span.links] for span in story.named("verify")] == [[], [1, 2], [], [4], []]


def test_draft_and_verify_spans_overlap_and_belong_to_their_processes() -> None:
    story = finish(a_hit_and_miss_story(), 10)
    draft, verify = story.named("draft")[1], story.named("verify")[0]
    assert draft.start_unix_nanos < verify.end_unix_nanos
    assert verify.start_unix_nanos < draft.end_unix_nanos
    assert (draft.process.role, verify.process.role) == (Role.DRAFT_WORKER, Role.TARGET_WORKER)
    assert {span.process.role for span in story.named("round")} == {Role.COORDINATOR}


def test_sums_over_rounds_are_the_statistics() -> None:
    story = finish(a_hit_and_miss_story(), 10)
    report = story.machine.transcript.statistics.report()
    assert report.draft_ms == 24.0
    assert sums(story, "draft_ms") == pytest.approx(report.draft_ms)
    assert sums(story, "exposed_ms") == pytest.approx(report.exposed_draft_ms) == 2.5
    assert sums(story, "hidden_ms") == pytest.approx(report.hidden_draft_ms)
    (generate,) = story.named("generate")
    assert generate.attributes["specpipe.hidden_ms"] == pytest.approx(report.hidden_draft_ms)


def test_a_round_says_how_it_began() -> None:
    story = finish(a_hit_and_miss_story(), 10)
    rounds = story.named("round")
    assert [span.attributes["specpipe.outcome"] for span in rounds] == ["none", "hit", "stale", "hit", "miss"]
    assert [[event.name for event in span.events] for span in rounds] == [
        [],
        ["hit"],
        ["miss", "stale", "restarted"],
        ["hit"],
        ["miss"],
    ]


def test_a_prefill_of_several_steps_is_one_span_that_ends_with_the_first_round() -> None:
    story = Story()
    story.admit()
    target = story.of(Kind.TARGET)
    story.prefill(target, 3.0, 5.0, num_rows=256)
    story.prefill(target, 8.0, 5.0, num_rows=256)
    story.verify(13.0, 5.0, base=3, num_rows=10)
    story.run(20.0)
    finish(story, 4)
    (prefill,) = story.named("prefill")
    assert (story.ms(prefill.start_unix_nanos), story.ms(prefill.end_unix_nanos)) == (3.0, 18.0)
    assert (prefill.attributes["specpipe.num_steps"], prefill.attributes["specpipe.num_rows"]) == (3, 522)


def test_rounds_of_a_long_answer_go_out_while_it_runs() -> None:
    story = Story()
    story.admit()
    for i in range(20):
        story.verify(3.0 + 5 * i, 5.0, base=3 + i)
    story.run(200.0)
    assert len(story.named("round")) == 14
    assert not story.named("generate")
    assert not story.trace.is_complete


def test_a_draft_step_longer_than_many_rounds_is_still_in_the_round_in_which_it_began() -> None:
    story = Story()
    story.admit()
    story.draft(3.0, 97.0, base=3)
    for i in range(20):
        story.verify(3.0 + 5 * i, 5.0, base=3 + i)
    story.run(150.0)
    finish(story, 23)
    (draft,) = story.named("draft")
    assert round_of(draft, story.spans) == 1
    assert sums(story, "draft_ms") == pytest.approx(97.0)


# Ends


def test_a_cancelled_request_ends_what_was_under_way_with_the_reason() -> None:
    story = a_hit_and_miss_story()
    story.cancel()
    end(story)
    (generate,) = story.named("generate")
    assert generate.error == "the client has left"
    assert generate.attributes["error.type"] == "CANCELLED"
    assert [event.name for event in generate.events] == ["cancel"]
    last = story.named("round")[-1]
    assert (last.error, last.attributes["specpipe.round"]) == ("the client has left", 5)
    assert last.end_unix_nanos == generate.end_unix_nanos


def test_a_request_cancelled_in_the_queue_ends_its_queue_span() -> None:
    story = Story()
    story.run(20.0)
    story.cancel()
    story.trace.complete()
    assert {span.name: span.error for span in story.spans} == {
        "generate": "the client has left",
        "queue": "the client has left",
        "tokenize": "",
    }


def test_a_request_cancelled_in_its_prefill_ends_that() -> None:
    story = Story()
    story.admit()
    story.run(20.0)
    story.cancel()
    end(story)
    (prefill,) = story.named("prefill")
    assert prefill.error == "the client has left"


def test_a_lost_target_ends_its_round_and_the_answer_moves() -> None:
    story = a_hit_and_miss_story()
    story.run(50.0)
    story.lose(story.of(Kind.TARGET))
    story.tick()
    story.verify(60.0, 8.0, base=10)
    story.run(75.0)
    finish(story, 11)
    rounds = story.named("round")
    assert [span.attributes["specpipe.round"] for span in rounds] == [1, 2, 3, 4, 5, 5, 6]
    assert [span.error for span in rounds] == ["", "", "", "", "target lost: it died", "", ""]
    (generate,) = story.named("generate")
    assert [event.name for event in generate.events] == ["session moved"]
    assert generate.error == ""
    assert len({span.attributes["specpipe.worker"] for span in story.named("verify")}) == 2


def test_a_lost_draft_worker_is_told_and_the_steps_of_its_successor_are_linked_right() -> None:
    story = a_hit_and_miss_story()
    old = story.of(Kind.DRAFT)
    story.lose(old)
    story.run(400.0)
    story.tick()
    new = story.of(Kind.DRAFT)
    assert new is not old
    again = story.draft(405.0, 4.0, base=10)  # its step 1, as the first one's first
    story.run(411.0)
    story.verify(411.0, 5.0, base=10, num_tokens=2, drafts=(again,))
    story.run(420.0)
    finish(story, 12)
    linked = {span.span_id: span for span in story.named("draft")}
    verify = story.named("verify")[4]
    assert [linked[link].attributes["specpipe.worker"] for link in verify.links] == [f"draft-{new.session}:1"]
    (generate,) = story.named("generate")
    assert [event.name for event in generate.events] == ["draft lost"]


def test_drafting_that_moves_is_told_with_who_took_over_and_why() -> None:
    story = a_hit_and_miss_story()
    old = story.of(Kind.DRAFT)
    story.move_draft(Cause.LOAD)
    story.run(50.0)
    new = story.of(Kind.DRAFT)
    again = story.draft(51.0, 4.0, base=10)  # its step 1, as the first one's first
    story.run(57.0)
    story.do(Received(Kind.DRAFT, Closed(session=old.session, length=10)))
    story.trace.session_over(old.session, story.now_ms)
    story.verify(57.0, 5.0, base=10, num_tokens=2, drafts=(again,))
    story.run(63.0)
    finish(story, 12)
    (generate,) = story.named("generate")
    (moved,) = generate.events
    assert moved.name == "draft moved"
    assert moved.attributes["specpipe.worker"] == f"draft-{new.session}:1"
    assert moved.attributes["specpipe.reason"] == "it has much more to do than another one"
    linked = {span.span_id: span for span in story.named("draft")}
    assert [linked[link].attributes["specpipe.worker"] for link in story.named("verify")[4].links] == [
        f"draft-{new.session}:1"
    ]
    assert len({span.attributes["specpipe.worker"] for span in linked.values()}) == 2


def test_a_successor_that_replaces_a_lost_worker_is_told_with_the_loss() -> None:
    story = a_hit_and_miss_story()
    old = story.of(Kind.DRAFT)
    story.move_draft(Cause.DRAINS)
    story.lose(old)
    story.run(60.0)
    finish(story, 10)
    (generate,) = story.named("generate")
    assert [(event.name, event.attributes["specpipe.reason"]) for event in generate.events] == [
        ("draft moved", "it died")
    ]


def test_a_node_of_a_lost_draft_worker_is_linked_to_the_step_of_that_worker() -> None:
    story = Story()
    story.admit()
    first = story.draft(3.0, 4.0, base=3)
    story.verify(3.0, 10.0, base=3)
    story.run(14.5)
    old = story.of(Kind.DRAFT)
    story.lose(old)
    story.run(300.0)
    story.tick()
    story.draft(305.0, 4.0, base=4)
    story.run(310.5)
    story.verify(310.5, 5.0, base=4, num_tokens=2, drafts=(first,))
    story.run(320.0)
    finish(story, 6)
    linked = {span.span_id: span.attributes["specpipe.worker"] for span in story.named("draft")}
    assert [linked[link] for link in story.named("verify")[1].links] == [f"draft-{old.session}:1"]


def test_what_a_stop_string_cut_away_is_marked() -> None:
    story = Story(stops=("108",))
    story.admit()
    first = story.draft(3.0, 4.0, base=3)
    story.verify(3.0, 10.0, base=3)
    story.run(13.0)
    story.verify(13.0, 10.0, base=4, num_tokens=6, drafts=(first,), exposed_ms=1.0)  # tokens 104 .. 109
    story.verify(23.0, 10.0, base=10, exposed_ms=4.0)  # before it heard of the end
    story.run(40.0)
    end(story)
    assert len(story.machine.tokens) == 9
    cut = [span.attributes.get("specpipe.num_cut", 0) for span in story.named("round")]
    assert cut == [0, 1, 1]
    report = story.machine.transcript.statistics.report()
    assert sums(story, "exposed_ms") == pytest.approx(report.exposed_draft_ms) == 1.0
    assert sums(story, "draft_ms") == pytest.approx(report.draft_ms) == 4.0


def test_a_worker_that_says_no_last_word_is_not_waited_for() -> None:
    story = a_hit_and_miss_story()
    story.verify(50.0, 5.0, base=10, finish_reason=FinishReason.STOP)
    story.run(60.0)
    story.tracing.ending(story.trace)
    story.tracing.tick(1000.0)
    assert not story.trace.is_complete
    story.tracing.tick(2100.0)
    assert story.trace.is_complete
    assert story.named("generate")[0].attributes["gen_ai.response.finish_reasons"] == ("stop",)


def test_a_refused_request_has_a_span_that_says_why() -> None:
    story = Story()
    trace = story.tracing.begin(Question(temperature=-1.0), (), received_ms=story.now_ms)
    assert trace is not None
    story.exported.spans.clear()
    trace.refuse(InvalidRequestError("temperature must be at least 0"), story.now_ms)
    (span,) = story.exported.spans
    assert (span.name, span.error) == ("generate", "temperature must be at least 0")
    assert span.attributes["error.type"] == "INVALID_ARGUMENT"


def test_a_failed_draft_session_and_missing_tokens_are_told() -> None:
    story = a_hit_and_miss_story()
    failed = Failed(
        session=story.of(Kind.DRAFT).session, code=ErrorCode.INTERNAL, message="it broke", is_retryable=True
    )
    story.say(story.of(Kind.DRAFT), 49.0, None, failed)
    story.verify(50.0, 5.0, base=12)  # a commit before it was lost
    story.run(60.0)
    assert story.machine.target is not None
    story.cancel()
    end(story)
    (generate,) = story.named("generate")
    assert [event.name for event in generate.events] == ["draft lost", "resync", "cancel"]
    assert generate.events[0].attributes["specpipe.reason"] == "it broke"


@pytest.mark.parametrize("name", ["since_open_ms", "forward_ms", "exposed_ms"])
def test_a_worker_that_says_nonsense_of_its_steps_breaks_nothing(name: str) -> None:
    story = a_hit_and_miss_story()
    target = story.of(Kind.TARGET)
    record = replace(target.record(StepKind.VERIFY, 50.0, 1.0, round=5, base=10), **{name: 1e308})
    story.say(target, 51.0, Report(session=target.session, since_open_ms=1e308, steps=(record, record)))
    story.run(60.0)
    finish(story, 10)
    assert all(0 <= span.start_unix_nanos <= span.end_unix_nanos < 2**63 for span in story.spans)
    export_request(story.spans)


def test_a_fault_of_ours_ends_the_trace_and_not_the_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    story = Story()
    story.admit()
    monkeypatch.setattr("coordinator.trace_rounds.verify_attributes", lambda *_: 1 / 0)
    for i in range(4):
        story.verify(3.0 + 5 * i, 5.0, base=3 + i)
    story.run(50.0)
    assert len(story.machine.tokens) == 7
    assert (story.trace.is_complete, story.tracing.num_open) == (True, 0)
    assert caplog.text.count("broke") == 1


# Levels and what is asked for


def test_level_request_asks_for_no_reports_and_tells_what_the_coordinator_saw() -> None:
    story = Story(telemetry=TelemetryConfig(trace_level="request"))
    story.admit()
    assert [opened.wants_reports for opened in story.opened] == [False, False]
    target = story.of(Kind.TARGET)
    tokens, origins = (103,), (Origin.PLAIN,)
    commit = Commit(
        session=target.session, round=1, base=3, tokens=tokens, origins=origins, finish_reason=FinishReason.STOP
    )
    story.say(target, 9.0, None, commit)
    end(story)
    assert {span.name for span in story.exported.spans} == {"generate", "queue", "tokenize", "prefill"}
    prefill = next(span for span in story.exported.spans if span.name == "prefill")
    assert (story.ms(prefill.start_unix_nanos), story.ms(prefill.end_unix_nanos)) == (1.0, 10.0)
    assert not story.spans, "too little to be kept"


def test_ranks_are_told_at_level_debug_alone() -> None:
    for level, num_ranks in (("round", 0), ("debug", 2)):
        story = Story(telemetry=TelemetryConfig(trace_level=level))
        story.admit()
        story.verify(3.0, 5.0, base=3, rank_ms=(5.0, 4.0))
        story.run(20.0)
        story.cancel()
        end(story)
        ranks = story.named("rank")
        assert [span.attributes["specpipe.forward_ms"] for span in ranks] == [5.0, 4.0][:num_ranks]
        assert all(parents(story.spans)[span.parent_id].name == "verify" for span in ranks)


@pytest.mark.parametrize("has_content", [False, True])
def test_prompts_and_answers_are_told_only_when_asked(has_content: bool) -> None:
    story = Story(telemetry=TelemetryConfig(has_content=has_content), question=Question(prompt="a secret"))
    story.admit()
    story.verify(3.0, 5.0, base=3, finish_reason=FinishReason.STOP)
    end(story)
    (generate,) = story.named("generate")
    assert ("secret" in str(generate.attributes)) is has_content
    assert ("gen_ai.output.messages" in generate.attributes) is has_content
    if has_content:
        answer = json.loads(str(generate.attributes["gen_ai.output.messages"]))
        assert answer[0]["finish_reason"] == "stop"


def test_attributes_of_generate_are_those_of_the_conventions() -> None:
    question = Question(prompt="x", temperature=0.5, top_k=4, stop=("a", "b"), seed=2**63, model="m")
    story = finish(a_hit_and_miss_story(question=question), 10)
    (generate,) = story.named("generate")
    assert generate.kind is SpanKind.SERVER
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "specpipe",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 4,
        "gen_ai.request.stop_sequences": ("a", "b"),
        "gen_ai.request.seed": str(2**63),  # beyond what a trace's integers hold
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 8,
        "specpipe.mode": "pipelined",
        "specpipe.rule": "coupled",
    }
    assert {name: generate.attributes.get(name) for name in wanted} == wanted


# The golden tree


def golden_story() -> Story:
    """Hits, misses, a lost draft worker, another one, and a cancel."""
    story = a_hit_and_miss_story(
        request=a_request(), metadata=(("traceparent", "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"),)
    )
    story.event(story.of(Kind.TARGET), SessionEventKind.PREEMPTED, 47.0, base=10)
    story.run(49.0)
    story.lose(story.of(Kind.DRAFT))
    story.verify(49.0, 8.0, base=10)
    story.run(400.0)
    story.tick()
    new = story.draft(404.0, 4.0, base=11)
    story.run(410.0)
    story.verify(410.0, 6.0, base=11, num_tokens=2, drafts=(new,))
    story.draft(412.0, 4.0, base=11)
    story.run(420.0)
    story.cancel()
    return end(story)


def label(span: Span) -> str:
    number = span.attributes.get("specpipe.round", span.attributes.get("specpipe.step"))
    worker = str(span.attributes.get("specpipe.worker", "")).partition(":")[0]
    return " ".join(str(part) for part in (span.name, number, worker) if part not in (None, ""))


def tree(spans: tuple[Span, ...]) -> list[dict[str, Any]]:
    known = {span.span_id: label(span) for span in spans}
    return [
        {
            "span": label(span),
            "parent": known.get(span.parent_id, f"{span.parent_id:016x}" if span.parent_id else ""),
            "process": span.process.role.value,
            "kind": span.kind.value,
            "links": [known[link] for link in span.links],
            "events": [event.name for event in span.events],
            "attributes": sorted(span.attributes),
            "error": span.error,
        }
        for span in spans
    ]


def test_the_tree_of_a_request_is_the_golden_one() -> None:
    """Made by this test from nothing if the file is not there; what changes on purpose is to be looked at in review."""
    found = tree(golden_story().spans)
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("kind", list(StepKind))
def test_a_flood_of_steps_that_lead_to_nothing_costs_little_and_every_span_can_be_sent(kind: StepKind) -> None:
    """Rounds beyond all tokens, drafts of rounds that never come, prefills without end, each of them years long."""
    story = Story()
    story.admit()
    worker = story.of(Kind.DRAFT if kind is StepKind.DRAFT else Kind.TARGET)
    for number in range(1, 200):
        steps = tuple(
            StepRecord(
                kind=kind, step=number * 1000 + i, round=number * 1000 + i, base=2**32 - 1, since_open_ms=1e11,
                forward_ms=1e11,
            )
            for i in range(100)
        )  # fmt: skip
        events = (SessionEvent(kind=SessionEventKind.RESYNC, since_open_ms=1e11),) * 100
        story.say(worker, 3.0, Report(session=worker.session, since_open_ms=1e11, steps=steps, events=events))
    story.verify(4.0, 5.0, base=3)
    story.run(20.0)
    finish(story, 4)
    assert len(story.exported.spans) < 5000
    (generate,) = story.named("generate")
    assert int(generate.attributes["specpipe.num_lost_records"]) > 30_000  # type: ignore[arg-type]
    times = [nanos for span in story.exported.spans for nanos in (span.start_unix_nanos, span.end_unix_nanos)]
    assert 0 <= min(times) <= max(times) < 2**63
    assert ExportTraceServiceRequest.FromString(export_request(story.exported.spans).SerializeToString())


def test_a_flood_of_links_and_of_events_is_cut_short_and_the_trace_can_still_be_read() -> None:
    story = Story()
    story.admit()
    draft, target = story.of(Kind.DRAFT), story.of(Kind.TARGET)
    idle = tuple(draft.record(StepKind.DRAFT, 3.0, 0.0, base=3) for _ in range(MAX_REPORT_RECORDS))
    told = draft.record(StepKind.DRAFT, 3.0, 1.0, base=3, share_ms=1.0)
    story.say(draft, 4.0, draft.report(4.0, *idle))
    extension = Extension(
        session=draft.session, base=3, parents=(0,), tokens=(1,), confidences=(0.5,), draft_step=told.step,
        draft_step_ms=1.0, draft_share_ms=2.0,
    )  # fmt: skip
    story.say(draft, 4.0, draft.report(4.0, told), extension)
    story.run(6.0)
    for number in range(1, 9):
        record = target.record(StepKind.VERIFY, 6.0, 1.0, round=number, base=3, draft_steps=(1,) * 4096)
        event = SessionEvent(kind=SessionEventKind.RESYNC, since_open_ms=target.since_open_ms(6.5))
        story.say(target, 8.0, target.report(8.0, record, events=(event,) * MAX_REPORT_RECORDS))
    story.run(10.0)
    story.cancel()
    story.close()
    story.tracing.tick(1e9)
    assert max(len(span.links) for span in story.named("verify")) == MAX_LINKS
    assert max(len(span.events) for span in story.spans) <= MAX_EVENTS
    kept = story.tracing.find("r")
    assert kept is not None
    assert len(trace_from_pb(trace_to_pb(kept)).spans) == len(story.spans)
