"""The life of a request under any order of events: the answer is the plain run's, and nobody is left behind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from coordinator_world import EOS, PROMPT, World, a_commit, a_machine, a_request, plain_run, started
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.draft_side import MAX_TAKEOVER_MS
from coordinator.events import (
    Admitted,
    Cause,
    Ended,
    Joined,
    Kind,
)
from coordinator.phases import Phase
from coordinator.settings import DriverSettings
from coordinator.state import MAX_TARGET_MOVES
from specpipe.answers import Chunk, Started
from specpipe.errors import (
    CapacityError,
    DeadlineExceededError,
    ErrorCode,
    InvalidRequestError,
    InvariantError,
    RequestCancelledError,
    SpecpipeError,
    WorkerUnavailableError,
)
from specpipe.types import (
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    FinishReason,
    Mode,
    NeedTokens,
    Open,
    RoundStats,
    Rule,
    SpeculationParams,
)
from specpipe.worker_stream import Timing


def test_a_request_opens_on_both_workers_and_streams() -> None:
    world = started()
    opens = world.all(Open)
    assert [world.sessions[message.session] for message in opens] == [Kind.TARGET, Kind.DRAFT]
    assert all(message.tokens == PROMPT and message.sampling.seed == 3 for message in opens)
    assert world.client == [Started(request_id="r", model="m", prompt_tokens=3, seed=3, rule=Rule.COUPLED)]
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10, 11], session=target))
    world.hear(Kind.TARGET, a_commit(5, [12, 13], session=target, round_=2, finish=FinishReason.LENGTH))
    assert world.tokens == [10, 11, 12, 13]
    assert world.text == "10 11 12 13"
    assert world.finished.finish_reason is FinishReason.LENGTH
    assert (world.finished.prompt_tokens, world.finished.completion_tokens) == (3, 4)
    assert world.sessions == {}, "both workers were told to close"
    assert world.machine.phase is Phase.FINISHED


def test_commits_go_to_the_draft_and_extensions_to_the_target() -> None:
    world = started()
    target, draft = world.session(Kind.TARGET), world.session(Kind.DRAFT)
    assert target is not None
    assert draft is not None
    extension = Extension(session=draft, base=3, parents=(0,), tokens=(10,), confidences=(0.5,), draft_step=1)
    world.hear(Kind.DRAFT, extension)
    assert world.sent[-1] == replace(extension, session=target)
    world.hear(Kind.TARGET, a_commit(3, [10], session=target))
    told = replace(a_commit(3, [10], session=target), session=draft, stats=RoundStats())
    assert world.sent[-1] == told, "but for the sums, which are no business of a draft worker's"


def test_steps_of_two_draft_workers_are_told_apart_on_the_way_to_the_target() -> None:
    world = started()
    target = world.session(Kind.TARGET)
    assert target is not None
    numbers = []
    for share_ms in (2.0, 3.0):
        draft = world.session(Kind.DRAFT)
        assert draft is not None
        for _ in range(2):  # the second tells of the same step
            extension = Extension(
                session=draft,
                base=3,
                parents=(0,),
                tokens=(10,),
                confidences=(0.5,),
                draft_step=5,
                draft_step_ms=9.0,
                draft_share_ms=share_ms,
            )
            world.hear(Kind.DRAFT, extension)
            numbers.append(world.all(Extension)[-1].draft_step)
        world.lose(Kind.DRAFT)
        world.tick()
    assert numbers == [1, 1, 2, 2]
    last = a_commit(3, [10], session=target, finish=FinishReason.LENGTH)
    world.hear(Kind.TARGET, replace(last, verified_draft_steps=(1,)))
    speculation = world.finished.speculation
    assert (speculation.draft_ms, speculation.wasted_draft_ms) == (5.0, 3.0), "its worker was gone by then"


def test_the_stop_token_is_counted_but_has_no_text() -> None:
    world = started()
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10, EOS], session=target, finish=FinishReason.STOP))
    assert world.tokens == [10, EOS]
    assert world.text == "10"
    assert world.finished.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH, FinishReason.STOP])
def test_a_stop_string_cuts_the_commit_that_completes_it(finish: FinishReason | None) -> None:
    world = started(stops=("12 13",))
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10, 11, 12], session=target))
    assert world.text == "10 11 ", "the beginning of the stop string is held back"
    world.hear(Kind.TARGET, a_commit(6, [13, 14, 15], session=target, round_=2, finish=finish))
    assert world.tokens == [10, 11, 12, 13], "tokens end with the one that completes it"
    assert world.text == "10 11 "
    assert world.finished.finish_reason is FinishReason.STOP
    assert world.finished.completion_tokens == 4
    assert world.finished.speculation.accepted_tokens == 3
    assert world.sessions == {}


def test_a_stop_string_on_the_last_allowed_token_beats_length() -> None:
    world = started(stops=("12",))
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10, 11, 12], session=target, finish=FinishReason.LENGTH))
    assert world.finished.finish_reason is FinishReason.STOP


def test_a_near_miss_arrives_complete() -> None:
    world = started(stops=("12 14",))
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10, 11, 12], session=target))
    world.hear(Kind.TARGET, a_commit(6, [13], session=target, round_=2, finish=FinishReason.LENGTH))
    assert world.text == "10 11 12 13"


def test_a_lost_draft_costs_nothing_and_is_replaced_from_the_tokens_held() -> None:
    world = started()
    target = world.session(Kind.TARGET)
    assert target is not None
    world.has[Kind.DRAFT] = False
    world.lose(Kind.DRAFT)
    told = world.sent[-1]
    assert isinstance(told, Extension)
    assert told.is_exhausted, "the target need not wait for a draft"
    world.hear(Kind.TARGET, a_commit(3, [10, 11], session=target))
    world.tick()
    assert world.session(Kind.DRAFT) is None
    world.has[Kind.DRAFT] = True
    world.tick()
    assert world.all(Open)[-1].tokens == (*PROMPT, 10, 11)
    assert world.session(Kind.DRAFT) not in (None, 2)


def test_a_lost_target_is_replaced_and_the_draft_keeps_its_session() -> None:
    world = started()
    target, draft = world.session(Kind.TARGET), world.session(Kind.DRAFT)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10, 11], session=target, round_=1))
    world.lose(Kind.TARGET)
    assert world.machine.phase is Phase.OPENING
    world.tick()
    again = world.all(Open)[-1]
    assert (again.tokens, again.num_prompt_tokens, again.sampling.seed) == ((*PROMPT, 10, 11), 3, 3)
    assert again.stops.max_length == 15
    assert world.session(Kind.DRAFT) == draft
    world.hear(Kind.TARGET, a_commit(5, [12], session=again.session, round_=1, finish=FinishReason.LENGTH))
    assert world.tokens == [10, 11, 12]
    assert [event.round for event in world.client if isinstance(event, Chunk)] == [1, 2]
    assert sum(isinstance(event, Started) for event in world.client) == 1


def test_without_a_target_in_time_the_request_fails_as_unavailable() -> None:
    world = started(has={Kind.TARGET: False, Kind.DRAFT: True}, max_target_wait_ms=1000.0)
    world.tick(900)
    assert world.error is None
    world.tick(200)
    assert isinstance(world.error, WorkerUnavailableError)
    assert world.client == []
    assert world.machine.phase is Phase.FAILED


def test_a_request_in_the_queue_waits_no_longer_than_others_where_no_target_is_ready() -> None:
    world = World(a_machine(a_request(received_ms=0.0), max_target_wait_ms=1000.0))
    world.tick(60_000)  # its turn will come
    world.tick(10, unready_ms=10)
    world.tick(900, unready_ms=910)
    world.tick(200)  # one was back, if only for a moment
    world.tick(10, unready_ms=5)
    world.tick(990, unready_ms=995)
    assert world.error is None
    world.tick(5, unready_ms=1000)
    assert isinstance(world.error, WorkerUnavailableError)
    assert "within 1.0 s: no target worker is ready" in str(world.error)
    assert world.machine.phase is Phase.FAILED


def test_the_wait_begins_with_the_request_however_long_no_target_has_been_ready() -> None:
    world = World(a_machine(a_request(received_ms=5000.0), max_target_wait_ms=1000.0), now_ms=5000.0)
    world.tick(999, unready_ms=60_000)
    assert world.error is None
    world.tick(1, unready_ms=60_001)
    assert isinstance(world.error, WorkerUnavailableError)


def test_the_wait_in_the_queue_counts_when_its_turn_comes() -> None:
    world = World(a_machine(a_request(received_ms=0.0), max_target_wait_ms=1000.0))
    world.has[Kind.TARGET] = False
    world.tick(900, unready_ms=900)
    world.do(Admitted())
    assert world.error is None
    world.tick(100, unready_ms=1000)
    assert isinstance(world.error, WorkerUnavailableError)


def test_the_time_in_which_a_lost_target_did_nothing_counts_as_waiting() -> None:
    world = started(max_target_wait_ms=8500.0)
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10], session=target))
    world.has[Kind.TARGET] = False
    world.lose(Kind.TARGET, stalled_ms=5000.0)
    world.tick(3400)
    assert world.error is None
    world.tick(100)
    assert isinstance(world.error, WorkerUnavailableError)
    assert "within 8.5 s: it died" in str(world.error)


def test_another_target_takes_over_however_long_the_lost_one_did_nothing() -> None:
    world = started(max_target_wait_ms=1000.0)
    world.lose(Kind.TARGET, stalled_ms=60_000.0)
    world.tick()
    assert world.error is None
    again = world.session(Kind.TARGET)
    assert again is not None
    world.hear(Kind.TARGET, a_commit(3, [10], session=again, finish=FinishReason.LENGTH))
    assert world.tokens == [10]


def test_a_client_hears_of_a_frozen_target_within_ten_seconds() -> None:
    settings = DriverSettings()
    last_heartbeat_s = Timing().interval_s
    assert settings.suspect_after_s > 2 * last_heartbeat_s, "one heartbeat may be late"
    assert settings.suspect_after_s < settings.max_target_silence_s < settings.max_target_wait_s
    assert settings.max_target_wait_s + 10 * settings.tick_s < 9.5


def test_targets_that_keep_dying_are_given_up() -> None:
    world = started()
    for _ in range(MAX_TARGET_MOVES + 1):
        world.lose(Kind.TARGET)
        world.tick()
    assert isinstance(world.error, WorkerUnavailableError)
    assert world.sessions == {}


def test_targets_that_end_in_order_may_be_any_number() -> None:
    world = started()
    for _ in range(3 * MAX_TARGET_MOVES):
        world.lose(Kind.TARGET, was_draining=True)
        world.tick()
    assert world.error is None
    assert world.session(Kind.TARGET) is not None


def test_a_draft_worker_that_ends_is_replaced_at_once() -> None:
    world = started()
    draft = world.session(Kind.DRAFT)
    assert draft is not None
    world.hear(Kind.DRAFT, Failed(session=draft, code=ErrorCode.UNAVAILABLE, message="ends", is_retryable=True))
    del world.sessions[draft]
    world.tick(1)
    assert world.session(Kind.DRAFT) not in (None, draft)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (ErrorCode.INVALID_ARGUMENT, InvalidRequestError),
        (ErrorCode.RESOURCE_EXHAUSTED, CapacityError),
        (ErrorCode.INTERNAL, SpecpipeError),
    ],
)
def test_a_final_failure_of_the_target_is_the_requests(code: ErrorCode, expected: type[SpecpipeError]) -> None:
    world = started()
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, Failed(session=target, code=code, message="never"))
    assert type(world.error) is expected
    assert str(world.error) == "never"


@pytest.mark.parametrize("code", [ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.UNAVAILABLE])
def test_a_target_that_takes_nothing_is_asked_again_until_the_wait_is_over(code: ErrorCode) -> None:
    """It is full, or drains. That is no move, so that MAX_TARGET_MOVES is no bound to it."""
    world = started(max_target_wait_ms=2000.0)
    num_asked = 0
    for _ in range(30):
        target = world.session(Kind.TARGET)
        if target is not None:
            num_asked += 1
            world.hear(Kind.TARGET, Failed(session=target, code=code, message="not now", is_retryable=True))
            del world.sessions[target]
        world.tick(100)
    assert MAX_TARGET_MOVES < num_asked <= 21
    assert isinstance(world.error, WorkerUnavailableError)
    assert "not now" in str(world.error)


def test_a_request_that_had_its_turn_too_soon_waits_while_all_targets_are_full() -> None:
    """Where two coordinators saw the same room, the second one has its turn and no place: it waits as a queue does."""
    world = started(max_target_wait_ms=2000.0)
    target = world.session(Kind.TARGET)
    assert target is not None
    world.has[Kind.TARGET], world.is_full = False, True
    world.hear(
        Kind.TARGET,
        Failed(session=target, code=ErrorCode.RESOURCE_EXHAUSTED, message="full", is_retryable=True),
    )
    del world.sessions[target]
    for _ in range(100):
        world.tick(1000)
    assert world.error is None
    world.is_full = False  # the last worker is gone
    for _ in range(2):
        world.tick(1000)
        assert world.error is None
    world.tick(1000)
    assert isinstance(world.error, WorkerUnavailableError)


def test_a_draft_that_refuses_for_good_is_not_asked_again() -> None:
    world = started()
    draft = world.session(Kind.DRAFT)
    assert draft is not None
    world.hear(Kind.DRAFT, Failed(session=draft, code=ErrorCode.INVALID_ARGUMENT, message="too long"))
    del world.sessions[draft]
    world.tick(100_000)
    assert len(world.all(Open)) == 2
    assert world.error is None


def test_a_draft_that_claims_too_many_tokens_is_closed() -> None:
    world = started()
    draft = world.session(Kind.DRAFT)
    assert draft is not None
    world.hear(Kind.DRAFT, NeedTokens(session=draft, have=50))
    assert [type(message) for message in world.sent if message.session == draft] == [Open, Close]


@pytest.mark.parametrize("kind", list(Kind))
def test_need_tokens_is_answered_by_one_commit_from_there(kind: Kind) -> None:
    world = started()
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10, 11, 12], session=target))
    session = world.session(kind)
    assert session is not None
    world.known[session] = [*PROMPT, 10]
    world.hear(kind, NeedTokens(session=session, have=4))
    assert world.sent[-1].base == 4
    assert world.sent[-1].tokens == (11, 12)
    assert world.sent[-1].round == 0


def test_a_commit_beyond_what_is_held_asks_for_what_is_missing() -> None:
    world = started()
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(5, [12], session=target))
    assert world.sent[-1] == NeedTokens(session=target, have=3)
    assert world.tokens == []
    world.hear(Kind.TARGET, replace(a_commit(3, [10, 11, 12], session=target), round=0))
    assert world.tokens == [10, 11, 12]


def test_a_commit_that_came_before_is_ignored_and_one_that_contradicts_fails_the_request() -> None:
    world = started()
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10, 11], session=target))
    world.hear(Kind.TARGET, a_commit(3, [10, 11], session=target))
    assert world.tokens == [10, 11]
    world.hear(Kind.TARGET, a_commit(4, [55], session=target))
    assert isinstance(world.error, InvariantError)
    assert "commit 3+2" in str(world.error), "the report tells the session's story"
    assert world.sessions == {}


def test_tokens_beyond_max_length_are_an_invariant_error() -> None:
    world = started(a_request(2))
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10, 11, 12], session=target))
    assert isinstance(world.error, InvariantError)


@pytest.mark.parametrize(
    "lie", [a_commit(3, [10, 11], session=0), a_commit(3, [10], session=0, finish=FinishReason.STOP)]
)
def test_an_answer_that_has_no_end_where_it_must_fails_at_once(lie: Commit) -> None:
    """At max_length, or where the target takes back what it went on with: else the client would wait for ever."""
    world = started(a_request(2))
    target = world.session(Kind.TARGET)
    assert target is not None
    if lie.finish_reason is not None:
        world.hear(Kind.TARGET, a_commit(3, [10], session=target))
    world.hear(Kind.TARGET, replace(lie, session=target))
    assert isinstance(world.error, InvariantError)
    assert world.sessions == {}


@pytest.mark.parametrize("phase", ["queued", "opening", "streaming"])
def test_a_client_that_leaves_frees_both_workers_at_once(phase: str) -> None:
    world = World(a_machine())
    if phase != "queued":
        world.do(Admitted())
    if phase == "streaming":
        target = world.session(Kind.TARGET)
        assert target is not None
        world.hear(Kind.TARGET, a_commit(3, [10], session=target))
    world.do(Ended(RequestCancelledError("gone")))
    assert world.machine.phase is Phase.CANCELLED
    assert world.sessions == {}
    world.do(Admitted())
    world.tick()
    assert world.machine.phase is Phase.CANCELLED, "a cancelled request never runs"
    assert isinstance(world.error, RequestCancelledError)


@pytest.mark.parametrize("is_admitted", [False, True])
def test_the_deadline_ends_a_request_wherever_it_is(is_admitted: bool) -> None:
    world = World(a_machine(a_request(deadline_ms=1000.0)))
    if is_admitted:
        world.do(Admitted())
        assert [message.remaining_ms for message in world.all(Open)] == [1000.0, 1000.0]
    world.tick(999)
    assert world.error is None
    world.tick(1)
    assert isinstance(world.error, DeadlineExceededError)
    assert world.sessions == {}


def test_remaining_time_shrinks_on_the_way() -> None:
    world = World(a_machine(a_request(deadline_ms=1000.0)))
    world.now_ms = 400.0
    world.do(Admitted())
    assert {message.remaining_ms for message in world.all(Open)} == {600.0}


@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationParams(mode=Mode.OFF, drafter="none"),
        SpeculationParams(drafter="ngram"),
        SpeculationParams(drafter="none"),
    ],
)
def test_no_draft_session_where_none_is_wanted(speculation: SpeculationParams) -> None:
    world = started(a_request(speculation=speculation))
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10], session=target))
    world.tick(100_000)
    assert [type(message) for message in world.sent] == [Open]


def test_late_messages_of_a_lost_session_are_ignored() -> None:
    world = started()
    old = world.session(Kind.TARGET)
    assert old is not None
    world.lose(Kind.TARGET)
    world.tick()
    world.hear(Kind.TARGET, a_commit(3, [10], session=old))
    world.hear(Kind.TARGET, Closed(session=old, length=3))
    assert world.tokens == []
    assert world.session(Kind.TARGET) not in (None, old)


# Any interleaving

COMMANDS = [
    *("move", "move", "move silent", "level", "extend next", "extend next", "extend nothing", "need next"),
    *("lose next", "fail next", "close next", "joined", "long tick"),
    *("step", "step", "step", "again", "hole", "extend", "need draft", "need target", "lose draft", "lose target"),
    *("draft off", "draft on", "fail draft", "close draft", "target off", "target on", "retry target", "tick", "late"),
]


@given(
    commands=st.lists(st.sampled_from(COMMANDS), max_size=60),
    blocks=st.lists(st.integers(1, 5), min_size=1, max_size=20),
    stop=st.sampled_from([None, "13", "14 15", "21 22", "never"]),
    eos_at=st.none() | st.integers(0, 14),
)
@settings(max_examples=300, deadline=None)
def test_any_interleaving_gives_the_plain_answer(
    commands: list[str], blocks: list[int], stop: str | None, eos_at: int | None
) -> None:
    run = plain_run(15)
    if eos_at is not None:
        run = [*run[:eos_at], EOS]
    world = started(a_request(15), stops=() if stop is None else (stop,), max_target_wait_ms=1e9)
    play = Play(world, run, blocks)
    for command in commands:
        play.do(command)
    play.finish()
    expected_tokens, expected_text = oracle(run, stop)
    if isinstance(world.error, WorkerUnavailableError):
        assert "were lost" in str(world.error)
        assert world.tokens == expected_tokens[: len(world.tokens)]
        return
    assert world.error is None
    assert world.tokens == expected_tokens
    assert world.text == expected_text
    assert world.sessions == {}
    report = world.finished.speculation
    assert world.finished.completion_tokens == len(expected_tokens)
    assert report.accepted_tokens <= report.verified_tokens


def oracle(run: list[int], stop: str | None) -> tuple[list[int], str]:
    texted = run[:-1] if run[-1] == EOS else run
    for count in range(1, len(texted) + 1):
        text = " ".join(map(str, texted[:count]))
        if stop is not None and stop in text:
            return run[:count], text[: text.index(stop)]
    return run, " ".join(map(str, texted))


@dataclass
class Play:
    """Workers that behave, apart from dying, repeating themselves and losing messages."""

    world: World
    run: list[int]
    blocks: list[int]
    num_steps: int = 0
    old_sessions: list[int] = field(default_factory=list)
    last: Commit | None = None

    def do(self, command: str) -> None:
        world = self.world
        target, draft = world.session(Kind.TARGET), world.session(Kind.DRAFT)
        match command:
            case "step" if target is not None:
                self._commit(target, len(world.known[target]))
            case "hole" if target is not None:
                self._commit(target, len(world.known[target]) + 1)
            case "again" if self.last is not None:
                world.hear(Kind.TARGET, self.last)
            case "extend" if draft is not None:
                base = len(world.known[draft])
                extension = Extension(session=draft, base=base, parents=(0,), tokens=(5,), confidences=(1.0,))
                world.hear(Kind.DRAFT, extension)
            case "move" | "level":
                world.move(Cause.LOAD if command == "level" else Cause.DRAINS)
            case "move silent":
                world.move(Cause.SILENT)
            case "extend next" | "extend nothing" if world.successor is not None:
                world.extend(world.successor, (5,) if command == "extend next" else ())
            case "need next" if world.successor is not None:
                world.hear(Kind.DRAFT, NeedTokens(session=world.successor, have=3))
            case "lose next" if world.successor is not None:
                world.lose_session(world.successor)
            case "fail next" if world.successor is not None:
                self._fail(Kind.DRAFT, world.successor)
            case "close next" if (successor := world.successor) is not None:
                world.hear(Kind.DRAFT, Closed(session=successor, length=3))
                world.sessions.pop(successor, None)
            case "joined":
                world.do(Joined())
            case "long tick":
                world.tick(MAX_TAKEOVER_MS)
            case "need draft" if draft is not None:
                world.hear(Kind.DRAFT, NeedTokens(session=draft, have=3))
            case "need target" if target is not None:
                world.hear(Kind.TARGET, NeedTokens(session=target, have=3))
            case "lose draft":
                world.lose(Kind.DRAFT)
            case "lose target":
                self.old_sessions += [] if target is None else [target]
                world.lose(Kind.TARGET)
            case "draft off" | "draft on":
                world.has[Kind.DRAFT] = command.endswith("on")
            case "target off" | "target on":
                world.has[Kind.TARGET] = command.endswith("on")
            case "fail draft" if draft is not None:
                self._fail(Kind.DRAFT, draft)
            case "close draft" if draft is not None:
                world.hear(Kind.DRAFT, Closed(session=draft, length=3))
                world.sessions.pop(draft, None)
            case "retry target" if target is not None:
                self._fail(Kind.TARGET, target)
            case "late" if self.old_sessions:
                world.hear(Kind.TARGET, a_commit(3, [77], session=self.old_sessions[-1]))
            case "tick":
                world.tick()

    def finish(self) -> None:
        self.world.has = {Kind.TARGET: True, Kind.DRAFT: True}
        for _ in range(100):
            self.do("tick")
            self.do("step")
            if self.world.machine.phase.is_over:
                return
        raise AssertionError("the request did not end")

    def _fail(self, kind: Kind, session: int) -> None:
        failed = Failed(session=session, code=ErrorCode.INTERNAL, message="oops", is_retryable=True)
        self.world.hear(kind, failed)
        self.world.sessions.pop(session, None)

    def _commit(self, session: int, base: int) -> None:
        """The next block from `base` on, which is where the coordinator is unless there is a hole."""
        size = self.blocks[self.num_steps % len(self.blocks)]
        self.num_steps += 1
        start = base - len(PROMPT)
        tokens = self.run[start : start + size]
        if not tokens:
            return
        is_last = start + len(tokens) == len(self.run)
        finish = (FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH) if is_last else None
        commit = a_commit(base, tokens, session=session, round_=self.num_steps, finish=finish)
        self.last = commit
        if base == len(self.world.known[session]):
            self.world.known[session] += tokens
            self.world.hear(Kind.TARGET, commit)
            return
        self.world.hear(Kind.TARGET, commit)
        asked = self.world.sent[-1]
        assert isinstance(asked, NeedTokens)
        missing = self.run[asked.have - len(PROMPT) : start + len(tokens)]
        self.world.known[session] += missing
        self.world.hear(Kind.TARGET, replace(a_commit(asked.have, missing, session=session, finish=finish), round=0))
