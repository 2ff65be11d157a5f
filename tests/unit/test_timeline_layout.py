"""Whatever spans come, a picture comes out whose parts lie where they happened and never on one another."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from timeline_traces import COORDINATOR, DRAFT, TARGET, TRACE_ID, TraceMaker, four_rounds, long_trace, nanos

from specpipe.errors import ConfigError
from specpipe.spans import KeptTrace, Process, Role, Span, SpanEvent
from specpipe.timeline import page, svg, terminal
from specpipe.timeline.glyphs import ASCII, UNICODE
from specpipe.timeline.layout import lay_out
from specpipe.timeline.model import Lane, Timeline, Tone
from specpipe.timeline.strips import MAX_STRIPS, parse_rounds, select
from specpipe.timeline.words import ms_text, share_text

modest = settings(max_examples=50, deadline=None)
NAMES = ("generate", "queue", "tokenize", "prefill", "round", "verify", "draft", "rank", "news\x1b[2J")
times = st.one_of(st.integers(0, 200), st.integers(0, 10**7)).map(float)
counts = st.one_of(st.integers(-1, 9), st.just(1.5), st.just("nine"), st.just(float("nan")), st.just(True))
attributes = st.dictionaries(
    st.sampled_from(
        [
            f"specpipe.{name}"
            for name in (
                "round",
                "num_verified",
                "num_accepted",
                "exposed_ms",
                "queue_ms",
                "share_ms",
                "rank",
                "worker",
            )
        ]
    ),
    counts,
).flatmap(
    lambda found: st.sampled_from(["hit", "miss", "late", "lookup", "none", "\N{SNOWMAN}\n"]).map(
        lambda outcome: {**found, "specpipe.outcome": outcome}
    )
)
processes = st.builds(
    Process,
    role=st.sampled_from(Role),
    address=st.sampled_from(["", "host-a:1", "host-b:2"]),
    incarnation=st.integers(0, 2),
    host=st.sampled_from(["", "here", "<&\x00>"]),
)
ids = st.integers(1, 12)


@st.composite
def any_spans(draw: st.DrawFn) -> Span:
    start, end = sorted((draw(times), draw(times)))
    moments = draw(st.lists(times, max_size=2))
    return Span(
        name=draw(st.sampled_from(NAMES)),
        trace_id=TRACE_ID,
        span_id=draw(ids),
        parent_id=draw(ids),
        process=draw(processes),
        start_unix_nanos=nanos(start),
        end_unix_nanos=nanos(end),
        attributes=draw(attributes),
        events=tuple(
            SpanEvent(name=draw(st.sampled_from(["hit", "late", "cancel", "\x07"])), unix_nanos=nanos(at))
            for at in moments
        ),
        links=tuple(draw(st.lists(ids, max_size=3))),
        error=draw(st.sampled_from(["", "", "lost\r"])),
    )


any_traces = st.lists(any_spans(), max_size=14).map(
    lambda spans: KeptTrace(trace_id=TRACE_ID, is_complete=True, spans=tuple(spans))
)


def rows_of(lane: Lane) -> list[list[tuple[float, float]]]:
    return [[(bar.start_ms, bar.end_ms) for bar in lane.bars if bar.row == row] for row in range(lane.num_rows)]


@modest
@given(any_traces)
def test_bars_of_a_row_are_in_order_and_never_overlap(trace: KeptTrace) -> None:
    timeline = lay_out(trace)
    for lane in timeline.lanes:
        assert all(0 <= bar.row < lane.num_rows for bar in lane.bars)
        assert [bar.start_ms for bar in lane.bars] == sorted(bar.start_ms for bar in lane.bars)
        for row in rows_of(lane):
            assert all(start <= end for start, end in row)
            assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(sorted(row)))


@modest
@given(any_traces)
def test_every_step_is_drawn_once_and_within_the_axis(trace: KeptTrace) -> None:
    timeline = lay_out(trace)
    spans = {span.span_id: span for span in reversed(trace.spans)}.values()
    bars = [bar for lane in timeline.lanes for bar in lane.bars]
    drawn = Counter(bar.id for bar in bars if bar.id)
    frames = [s for s in spans if s.name == "generate" or (s.name == "round" and not s.error)]
    prefills = [span for span in spans if span.name == "prefill"]  # one that was a round as well is drawn as that
    assert all(drawn[span.span_id] == 0 for span in frames)
    assert all(drawn[span.span_id] <= 1 for span in prefills)
    assert all(drawn[span.span_id] == 1 for span in spans if span not in frames and span not in prefills)
    assert all(-1e-9 <= bar.start_ms <= bar.end_ms <= timeline.duration_ms + 0.1 for bar in bars)
    assert sum(len(lane.marks) for lane in timeline.lanes) == sum(
        event.name not in ("hit", "late") for span in spans for event in span.events
    )


@modest
@given(any_traces)
def test_rounds_have_growing_numbers_and_sums_that_add_up(trace: KeptTrace) -> None:
    timeline = lay_out(trace)
    numbers = [one.number for one in timeline.rounds]
    assert numbers == sorted(set(numbers))
    assert all(one.start_ms <= one.end_ms for one in timeline.rounds)
    totals = timeline.totals
    assert totals.num_hits + totals.num_misses <= len(timeline.rounds)
    assert 0 <= totals.hidden_ms <= totals.draft_ms
    assert totals.hidden_share is None or 0 <= totals.hidden_share <= 1


@modest
@given(any_traces, st.sampled_from([1, 40, 79, 100, 400]), st.sampled_from([ASCII, UNICODE]))
def test_any_picture_can_be_drawn_and_its_lines_fit(trace: KeptTrace, width: int, glyphs: object) -> None:
    timeline = lay_out(trace)
    for line in terminal.render(timeline, width=width, glyphs=glyphs):  # type: ignore[arg-type]
        assert cell_len(line.plain) <= max(width, terminal.MIN_WIDTH)
        assert line.plain.isprintable()
        assert (
            glyphs is UNICODE
            or line.plain.replace("\N{REPLACEMENT CHARACTER}", "").replace("\N{SNOWMAN}", "").isascii()
        )
    assert svg.render(timeline)
    assert page.render(timeline)


def lane(timeline: Timeline, name: str) -> Lane:
    return next(lane for lane in timeline.lanes if lane.name == name)


def test_a_process_has_a_lane_and_bars_have_the_tone_of_what_became_of_them() -> None:
    timeline = lay_out(four_rounds())
    assert [one.name for one in timeline.lanes] == ["coordinator", "target", "draft"]
    assert [bar.tone for bar in lane(timeline, "draft").bars] == [
        Tone.PREFILL,
        Tone.ACCEPTED,
        Tone.WASTED,
        Tone.REJECTED,
    ]
    assert [(bar.tone, bar.round) for bar in lane(timeline, "target").bars] == [
        (Tone.PREFILL, 1),  # the step that ended the prefill was the first round
        (Tone.HIT, 2),
        (Tone.QUEUED, 3),
        (Tone.EXPOSED, 3),
        (Tone.MISS, 3),
        (Tone.LOOKUP, 4),
    ]


def test_a_round_links_to_the_bars_of_the_draft_steps_that_it_verified() -> None:
    timeline = lay_out(four_rounds())
    drafts = {bar.id: bar for bar in lane(timeline, "draft").bars}
    hit = next(bar for bar in lane(timeline, "target").bars if bar.tone is Tone.HIT)
    assert [drafts[link].tone for link in hit.links] == [Tone.ACCEPTED]


def test_waits_end_where_their_step_begins_and_stop_at_the_bar_before() -> None:
    bars = lane(lay_out(four_rounds()), "target").bars
    queue, exposed, miss = bars[2:5]
    assert (exposed.start_ms, exposed.end_ms) == (53.0, miss.start_ms)
    assert (queue.start_ms, queue.end_ms) == (51.0, 53.0)
    make = TraceMaker()
    make.add("verify", 0.0, 10.0, TARGET, round=1)
    make.add("verify", 12.0, 20.0, TARGET, round=2, exposed_ms=50.0, queue_ms=50.0)
    assert [(bar.tone, bar.start_ms) for bar in lay_out(make.trace()).lanes[0].bars][1] == (Tone.EXPOSED, 10.0)


def test_what_happened_on_a_worker_is_marked_on_its_lane() -> None:
    make = TraceMaker()
    make.add("generate", 0.0, 30.0, COORDINATOR, events=(("cancel", 29.0),))
    round_id = make.add("round", 0.0, 20.0, COORDINATOR, round=1, events=(("stale", 5.0), ("hit", 5.0)))
    make.add("verify", 5.0, 20.0, TARGET, parent_id=round_id)
    make.add("draft", 1.0, 3.0, DRAFT, parent_id=round_id)
    restarted = SpanEvent(name="restarted", unix_nanos=nanos(2.0), attributes={"specpipe.worker": DRAFT.address})
    make.spans[1] = replace(make.spans[1], events=(*make.spans[1].events, restarted))
    marks = {one.name: [mark.text for mark in one.marks] for one in lay_out(make.trace()).lanes}
    assert marks == {"coordinator": ["cancel"], "target": [], "draft": ["restarted"]}


def test_ranks_lie_below_their_step_however_long_they_took() -> None:
    make = TraceMaker()
    verify = make.add("verify", 0.0, 10.0, TARGET, round=1)
    make.add("rank", 0.0, 9.0, TARGET, parent_id=verify, rank=0)
    make.add("rank", 0.0, 11.0, TARGET, parent_id=verify, rank=1)
    bars = lay_out(make.trace()).lanes[0].bars
    assert [(bar.row, bar.details[0]) for bar in bars] == [(0, "round 1: plain"), (1, "rank"), (2, "rank")]


def test_extensions_that_came_too_late_are_told_with_the_round_that_they_came_before() -> None:
    make = TraceMaker()
    make.add("round", 0.0, 20.0, COORDINATOR, round=1)
    make.add("verify", 5.0, 20.0, TARGET, parent_id=1, round=1)
    late = SpanEvent(name="late", unix_nanos=nanos(5.0), attributes={"specpipe.num_extensions": 3})
    make.spans[0] = replace(make.spans[0], events=(late,))
    target = next(one for one in lay_out(make.trace()).lanes if one.is_target)
    assert target.bars[0].details[-1] == "late extensions before it: 3"


def test_a_worker_and_its_successor_have_a_lane_each() -> None:
    make = TraceMaker()
    make.add("verify", 0.0, 10.0, TARGET, round=1)
    make.add("verify", 20.0, 30.0, replace(TARGET, incarnation=9), round=2)
    assert [one.name for one in lay_out(make.trace()).lanes] == ["target 1", "target 2"]


def test_rounds_are_counted_from_1_where_their_numbers_tell_nothing_apart() -> None:
    make = TraceMaker()
    for start in (0.0, 10.0, 20.0):
        make.add("verify", start, start + 9.0, TARGET, round=7)
    assert [one.number for one in lay_out(make.trace()).rounds] == [1, 2, 3]


def test_a_round_that_is_not_told_yet_is_a_hit_if_nodes_were_verified() -> None:
    make = TraceMaker()
    make.add("verify", 0.0, 9.0, TARGET, parent_id=99, round=1)
    make.add("verify", 10.0, 19.0, TARGET, parent_id=99, round=2, num_verified=3, num_accepted=1)
    assert [one.tone for one in lay_out(make.trace()).rounds] == [Tone.PLAIN, Tone.HIT]


def test_sums_of_times_are_those_of_the_request_where_it_tells_them() -> None:
    make = TraceMaker()
    make.add("generate", 0.0, 30.0, COORDINATOR, draft_ms=10.0, exposed_ms=4.0, num_rounds=1)
    make.add("draft", 0.0, 9.0, DRAFT, share_ms=3.0)
    totals = lay_out(make.trace()).totals
    assert (totals.draft_ms, totals.exposed_ms, totals.hidden_ms, totals.wasted_ms) == (10.0, 4.0, 6.0, 10.0)


def test_an_empty_trace_is_a_picture_too() -> None:
    timeline = lay_out(KeptTrace(trace_id=1, is_complete=False), request_id="r-9")
    assert (timeline.request_id, timeline.rounds, timeline.lanes) == ("r-9", (), ())
    assert terminal.render(timeline, width=80, glyphs=ASCII)[0].plain == "request r-9 - not complete yet"


def test_a_short_answer_is_drawn_whole_and_a_long_one_in_part() -> None:
    short, long = lay_out(long_trace(20)), lay_out(long_trace(500))
    whole, part = select(short, per_strip=8), select(long, per_strip=8)
    assert [one.number for strip in whole.strips for one in strip.rounds] == list(range(1, 21))
    assert (whole.num_left_out, whole.slowest) == (0, ())
    assert len(part.strips) <= MAX_STRIPS
    shown = [one for strip in part.strips for one in strip.rounds]
    assert part.num_left_out == 500 - len(shown)
    assert shown[0].number == 1
    assert part.slowest[0] == max(long.rounds, key=lambda one: one.duration_ms)
    assert part.slowest[0] in shown


def test_what_came_before_the_first_round_has_a_strip_of_its_own_only_if_it_is_long() -> None:
    for waited_ms, num_strips in ((1.0, 1), (80.0, 2)):
        make = TraceMaker()
        make.add("queue", 0.0, waited_ms, COORDINATOR)
        make.add("verify", waited_ms, waited_ms + 10.0, TARGET, round=1)
        strips = select(lay_out(make.trace()), per_strip=8).strips
        assert (len(strips), strips[0].start_ms) == (num_strips, 0.0)


def test_strips_follow_one_another_and_leave_every_round_room() -> None:
    timeline = lay_out(long_trace(500))
    strips = select(timeline, per_strip=8, wanted=(1, 500)).strips
    assert [one.number for strip in strips for one in strip.rounds] == list(range(1, 501))
    assert all(1 <= len(strip.rounds) <= 8 for strip in strips)
    assert all(one.end_ms <= other.start_ms + 1e-9 for one, other in pairwise(strips))
    slow = next(strip for strip in strips if any(one.duration_ms > 50 for one in strip.rounds))
    assert slow.end_ms - slow.start_ms < 8 * 2 * 15 * 1.2  # not more than twice what fits


def test_rounds_can_be_asked_for() -> None:
    timeline = lay_out(long_trace(30))
    strips = select(timeline, per_strip=8, wanted=(7, 9)).strips
    assert [one.number for strip in strips for one in strip.rounds] == [7, 8, 9]
    with pytest.raises(ConfigError, match="--rounds 31-40: the request has rounds 1 to 30"):
        select(timeline, per_strip=8, wanted=(31, 40))
    with pytest.raises(ConfigError, match="the request has no rounds yet"):
        select(lay_out(KeptTrace(trace_id=1, is_complete=False)), per_strip=8, wanted=(1, 1))


@pytest.mark.parametrize(("text", "expected"), [("7", (7, 7)), ("7-20", (7, 20)), ("1-1", (1, 1))])
def test_a_range_of_rounds_is_read(text: str, expected: tuple[int, int]) -> None:
    assert parse_rounds(text) == expected


@pytest.mark.parametrize("text", ["", "-", "7-", "-7", "a-b", "7-8-9", "0-3", "9-7", "1.5", "\N{SUPERSCRIPT TWO}"])
def test_what_is_no_range_of_rounds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--rounds must"):
        parse_rounds(text)


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.0, "0 ms"), (0.042, "0.04 ms"), (9.999, "10.0 ms"), (99.96, "100 ms"), (999.6, "1.00 s"), (12_345.0, "12.3 s")],
)
def test_durations_have_about_three_digits(ms: float, text: str) -> None:
    assert ms_text(ms) == text


@pytest.mark.parametrize(("share", "text"), [(0.0, "0 %"), (0.001, "1 %"), (0.999, "99 %"), (1.0, "100 %")])
def test_nothing_and_all_are_said_of_nothing_and_all_only(share: float, text: str) -> None:
    assert share_text(share) == text
