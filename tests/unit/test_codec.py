"""Every message survives the wire; what a peer gets wrong is refused by name and costs only itself."""

import dataclasses
import math
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpipe import codec, codec_hello, codec_reports
from specpipe.codec_hello import heartbeat_from_pb
from specpipe.errors import ErrorCode, InvalidRequestError
from specpipe.link import Outbox
from specpipe.reports import (
    MAX_REPORT_RECORDS,
    Outcome,
    Report,
    SessionEvent,
    SessionEventKind,
    StepKind,
    StepRecord,
)
from specpipe.rpc.v1 import common_pb2, worker_pb2
from specpipe.types import (
    Batch,
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    FinishReason,
    Heartbeat,
    Hello,
    Mode,
    ModelInfo,
    NeedTokens,
    Open,
    Origin,
    ProcessInfo,
    Proposal,
    RoundStats,
    Rule,
    SamplingParams,
    SpeculationParams,
    StopRules,
)

VOCAB_SIZE = 1000
MAX_CONTEXT = 200
LIMITS = codec.Limits(vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
names = st.text(string.printable, max_size=20)
token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20).map(tuple)
float32s = st.floats(0.0, 1.0, width=32)
durations = st.floats(0.0, 1e9)

samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0.0, 100.0, width=32),
    top_p=st.floats(0.0, 1.0, width=32, exclude_min=True, allow_subnormal=False),
    top_k=u32,
    min_p=float32s,
    seed=u64,
    choice=u32,
)
stop_rules = st.builds(
    StopRules,
    eos_token_ids=token_ids,
    stop_token_ids=token_ids,
    ignore_eos=st.booleans(),
    min_length=u32,
    max_length=u32,
)
speculations = st.builds(
    SpeculationParams,
    mode=st.sampled_from(Mode),
    rule=st.sampled_from(Rule),
    num_speculative_tokens=st.none() | u32,
    drafter=names,
)


@st.composite
def opens(draw):
    tokens = draw(token_ids.filter(len))
    return Open(
        session=draw(u64),
        request_id=draw(names),
        tokens=tokens,
        num_prompt_tokens=draw(st.integers(1, len(tokens))),
        sampling=draw(samplings),
        stops=draw(stop_rules),
        speculation=draw(speculations),
        remaining_ms=draw(st.none() | durations),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        trace_context=draw(names),
        adapter=draw(names),
        vocab_size=draw(u32),
        wants_reports=draw(st.booleans()),
    )


@st.composite
def extensions(draw):
    tokens = draw(token_ids)
    parents = tuple(draw(st.integers(0, index)) for index in range(len(tokens)))
    return Extension(
        session=draw(u64),
        base=draw(u32),
        parents=parents,
        tokens=tokens,
        confidences=tuple(draw(float32s) for _ in tokens),
        is_exhausted=draw(st.booleans()),
        drafter=draw(names),
        draft_step=draw(u64),
        draft_step_ms=draw(durations),
        draft_share_ms=draw(durations),
        proposals=draw(proposals(parents, tokens)),
    )


@st.composite
def proposals(draw, parents, tokens):
    """Below some of the nodes' parents, each with one of its children as the sampled one."""
    made = []
    for parent in sorted({parent for parent in parents if draw(st.booleans())}):
        child = next(token for p, token in zip(parents, tokens, strict=True) if p == parent)
        others = draw(st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=5)) - {child}
        share = float(np.float32(1 / (1 + len(others))))
        made.append(
            Proposal(parent=parent, tokens=(*others, child), probs=(share,) * (1 + len(others)), index=len(others))
        )
    return tuple(made)


@st.composite
def commits(draw):
    tokens = draw(token_ids)
    counts = {name: draw(u32) for name in RoundStats.__slots__ if name.startswith("num_")}
    times = {name: draw(durations) for name in RoundStats.__slots__ if name.endswith("_ms")}
    return Commit(
        session=draw(u64),
        round=draw(u32),
        base=draw(st.integers(0, MAX_CONTEXT - len(tokens))),
        tokens=tokens,
        origins=tuple(draw(st.sampled_from(Origin)) for _ in tokens),
        next_budget=draw(u32),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        verified_draft_steps=tuple(draw(st.lists(u64, max_size=4))),
        stats=RoundStats(**counts, **times),
    )


failures = st.builds(Failed, session=u64, code=st.sampled_from(ErrorCode), message=names, is_retryable=st.booleans())
heartbeats = st.builds(Heartbeat, step=u64, step_running_ms=durations, num_sessions=u32, num_free_slots=u32)
models = st.builds(
    ModelInfo,
    name=names,
    fingerprint=names,
    tokenizer_fingerprint=names,
    vocab_size=st.integers(1, 2**32 - 1),
    max_context=st.integers(1, 2**32 - 1),
    eos_token_ids=st.lists(u32, max_size=3).map(tuple),
)
hellos = st.builds(
    Hello,
    protocol_version=u32,
    incarnation=u64,
    model=st.none() | models,
    num_slots=u32,
    max_sessions=u32,
    process=st.builds(ProcessInfo, host=names, pid=u32, version=names),
    minor_version=u32,
)
steps = st.builds(
    StepRecord,
    kind=st.sampled_from(StepKind),
    step=u64,
    outcome=st.sampled_from(Outcome),
    draft_steps=st.lists(u64, max_size=3).map(tuple),
    rank_ms=st.lists(durations, max_size=3).map(tuple),
    **{name: u32 for name in StepRecord.__slots__ if name.startswith(("num_", "batch_")) or name in ("round", "base")},
    **{name: durations for name in StepRecord.__slots__ if name.endswith("_ms") and name != "rank_ms"},
)
events = st.builds(SessionEvent, kind=st.sampled_from(SessionEventKind), since_open_ms=durations, base=u32)


def few(strategy):
    return st.lists(strategy, max_size=3).map(tuple)


reports = st.builds(Report, session=u64, since_open_ms=durations, steps=few(steps), events=few(events), num_lost=u32)
batches = st.builds(
    Batch,
    sequence=u64,
    opens=few(opens()),
    extensions=few(extensions()),
    commits=few(commits()),
    need_tokens=few(st.builds(NeedTokens, session=u64, have=u32)),
    failures=few(failures),
    closes=few(st.builds(Close, session=u64, reason=names)),
    closed=few(st.builds(Closed, session=u64, length=u32)),
    heartbeat=st.none() | heartbeats,
    reports=few(reports),
)


def over_the_wire(message_pb):
    return type(message_pb).FromString(message_pb.SerializeToString())


@given(batches)
def test_a_batch_comes_back_as_it_was(batch):
    assert codec.batch_from_pb(over_the_wire(codec.batch_to_pb(batch)), LIMITS) == (batch, [])


@given(hellos)
def test_a_hello_comes_back_as_it_was(hello):
    assert codec_hello.hello_from_pb(over_the_wire(codec_hello.hello_to_pb(hello))) == hello


@given(heartbeats)
def test_a_heartbeat_comes_back_as_it_was(heartbeat):
    assert codec_hello.heartbeat_from_pb(over_the_wire(codec_hello.heartbeat_to_pb(heartbeat))) == heartbeat


@pytest.mark.parametrize("table", [codec.MODES, codec.RULES, codec.FINISH_REASONS, codec.ORIGINS, codec.ERROR_CODES])
def test_every_enum_covers_the_wire(table):
    assert 0 not in table._from_pb  # UNSPECIFIED is no value
    assert len(set(table._to_pb.values())) == len(table._to_pb)
    with pytest.raises(InvalidRequestError, match="has no value 77"):
        table.from_pb(77)


def test_enums_of_the_wire_have_no_value_that_types_lack():
    for wire, kind in (
        (common_pb2.Mode, Mode),
        (common_pb2.Rule, Rule),
        (common_pb2.FinishReason, FinishReason),
        (common_pb2.Origin, Origin),
        (common_pb2.ErrorCode, ErrorCode),
        (worker_pb2.StepKind, StepKind),
        (worker_pb2.SessionEventKind, SessionEventKind),
    ):
        assert len(wire.keys()) == len(kind) + 1
    assert len(worker_pb2.Outcome.keys()) == len(Outcome)  # NONE is the wire's UNSPECIFIED


def test_every_field_of_types_is_on_the_wire():
    pairs = [
        (Open, worker_pb2.Open),
        (Extension, worker_pb2.Extension),
        (Commit, worker_pb2.Commit),
        (RoundStats, worker_pb2.RoundStats),
        (Failed, worker_pb2.Failed),
        (Hello, worker_pb2.Hello),
        (ProcessInfo, worker_pb2.ProcessInfo),
        (Report, worker_pb2.Report),
        (StepRecord, worker_pb2.StepRecord),
        (SessionEvent, worker_pb2.SessionEvent),
        (Batch, worker_pb2.Batch),
        (ModelInfo, common_pb2.ModelInfo),
        (SamplingParams, common_pb2.ResolvedSampling),
        (StopRules, common_pb2.StopRules),
        (SpeculationParams, common_pb2.ResolvedSpeculation),
    ]
    for kind, message in pairs:
        assert set(kind.__slots__) - {"arrived_s"} == set(message.DESCRIPTOR.fields_by_name), kind


def an_open_pb(**changes):
    message = Open(
        session=7,
        request_id="r",
        tokens=(1, 2, 3),
        num_prompt_tokens=2,
        sampling=SamplingParams(),
        stops=StopRules(max_length=9),
        speculation=SpeculationParams(),
    )
    return changed(codec.open_to_pb(message), changes)


def an_extension_pb(**changes):
    message = Extension(session=7, base=3, parents=(0, 1), tokens=(4, 5), confidences=(0.5, 0.25))
    return changed(codec.extension_to_pb(message), changes)


def a_commit_pb(**changes):
    message = Commit(session=7, round=1, base=3, tokens=(4,), origins=(Origin.PLAIN,))
    return changed(codec.commit_to_pb(message), changes)


def changed(message_pb, changes):
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = message_pb
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(value, list):
            target.ClearField(name)
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return message_pb


WRONG_OPENS = [
    ({"tokens": []}, "num_prompt_tokens is 2 of 0"),
    ({"num_prompt_tokens": 0}, "num_prompt_tokens is 0"),
    ({"num_prompt_tokens": 4}, "num_prompt_tokens is 4 of 3"),
    ({"tokens": [1, VOCAB_SIZE]}, f"id {VOCAB_SIZE} is not below {VOCAB_SIZE}"),
    ({"tokens": [1] * (MAX_CONTEXT + 1)}, "201 ids are more than the context of 200"),
    ({"stops__stop_token_ids": [2**32 - 1]}, "stop_token_ids: id 4294967295"),
    ({"sampling__temperature": math.nan}, "temperature is nan"),
    ({"sampling__temperature": math.inf}, "temperature is inf"),
    ({"sampling__temperature": -1.0}, "temperature is -1"),
    ({"sampling__top_p": 0.0}, "top_p is 0"),
    ({"sampling__top_p": 1.5}, "top_p is 1.5"),
    ({"sampling__min_p": math.nan}, "min_p is nan"),
    ({"speculation__mode": 0}, "mode has no value 0"),
    ({"speculation__rule": 99}, "rule has no value 99"),
    ({"remaining_ms": math.nan}, "remaining_ms"),
    ({"request_id": "x" * 2000}, "request_id has 2000 characters"),
]


def a_proposal_pb(**changes):
    return worker_pb2.Proposal(**{"parent": 0, "tokens": [4, 5], "probs": [0.5, 0.5], "index": 0} | changes)


WRONG_EXTENSIONS = [
    ({"parents": [0, 2]}, r"parents\[1\] is 2"),
    ({"parents": [1, 0]}, r"parents\[0\] is 1"),
    ({"parents": [0]}, "differ in length"),
    ({"confidences": [0.5]}, "differ in length"),
    ({"confidences": [0.5, math.nan]}, "a confidence is nan"),
    ({"confidences": [0.5, -0.5]}, "a confidence is -0.5"),
    ({"confidences": [0.5, 2.0]}, "a confidence is 2"),
    ({"tokens": [4, VOCAB_SIZE + 5]}, "id 1005"),
    ({"draft_step_ms": math.inf}, "draft_step_ms is inf"),
    ({"draft_share_ms": -1.0}, "draft_share_ms is -1"),
    (
        {"parents": [0] * 5000, "tokens": [1] * 5000, "confidences": [0.1] * 5000},
        "5000 nodes are more than 4096",
    ),
    ({"proposals": [a_proposal_pb(index=2)]}, "index 2 of 2"),
    ({"proposals": [a_proposal_pb(index=1)]}, "sampled child 5 is not a node"),
    ({"proposals": [a_proposal_pb(parent=7)]}, "is not a node"),
    ({"proposals": [a_proposal_pb(tokens=[])]}, "0 tokens and 2 probabilities"),
    ({"proposals": [a_proposal_pb(tokens=[4, 4])]}, "a token twice"),
    ({"proposals": [a_proposal_pb(tokens=[4, VOCAB_SIZE])]}, "id 1000"),
    ({"proposals": [a_proposal_pb(probs=[0.5, math.nan])]}, "outside 0..1"),
    ({"proposals": [a_proposal_pb(probs=[1.5, -0.5])]}, "outside 0..1"),
    ({"proposals": [a_proposal_pb(probs=[0.5, 0.4998])]}, "sum to 0.999"),
    ({"proposals": [a_proposal_pb(), a_proposal_pb()]}, "a second one"),
    ({"proposals": [a_proposal_pb()] * 3}, "3 proposals for 2 nodes"),
    ({"proposals": [a_proposal_pb(tokens=range(65), probs=[1 / 65] * 65)]}, "more than 64 tokens"),
]
WRONG_COMMITS = [
    ({"origins": []}, "1 tokens have 0 origins"),
    ({"origins": [0]}, "origin has no value 0"),
    ({"tokens": [VOCAB_SIZE]}, "id 1000"),
    ({"base": MAX_CONTEXT}, "end after the context of 200"),
    ({"finish_reason": 9}, "finish_reason has no value 9"),
    ({"stats__step_ms": math.nan}, "step_ms is nan"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_OPENS)
def test_a_wrong_open_is_refused(changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        codec.open_from_pb(an_open_pb(**changes), LIMITS)


@pytest.mark.parametrize(("changes", "message"), WRONG_EXTENSIONS)
def test_a_wrong_extension_is_refused(changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        codec.extension_from_pb(an_extension_pb(**changes), LIMITS)


@pytest.mark.parametrize(("changes", "message"), WRONG_COMMITS)
def test_a_wrong_commit_is_refused(changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        codec.commit_from_pb(a_commit_pb(**changes), LIMITS)


WRONG_REPORTS = [
    ({"since_open_ms": math.nan}, "since_open_ms is nan"),
    ({"since_open_ms": -1.0}, "since_open_ms is -1.0"),
    ({"steps": [worker_pb2.StepRecord()] * (MAX_REPORT_RECORDS + 1)}, "more than 512 records"),
    ({"events": [worker_pb2.SessionEvent()] * (MAX_REPORT_RECORDS + 1)}, "more than 512 records"),
    ({"events": [worker_pb2.SessionEvent(kind=1, since_open_ms=math.inf)]}, "since_open_ms is inf"),
    *(
        ({"steps": [worker_pb2.StepRecord(kind=2, **{name: -0.5})]}, f"{name} is -0.5")
        for name in StepRecord.__slots__
        if name.endswith("_ms") and name != "rank_ms"
    ),
    ({"steps": [worker_pb2.StepRecord(kind=2, rank_ms=[1.0, math.nan])]}, "rank_ms is nan"),
    ({"steps": [worker_pb2.StepRecord(kind=2, rank_ms=[0.0] * 1025)]}, "too many ranks"),
    ({"steps": [worker_pb2.StepRecord(kind=2, draft_steps=range(4097))]}, "too many ranks or draft steps"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_REPORTS)
def test_a_wrong_report_is_refused(changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        codec_reports.report_from_pb(worker_pb2.Report(session=7, **changes))


def test_records_that_this_version_does_not_know_are_counted_as_lost():
    known = worker_pb2.StepRecord(kind=2, step=5, outcome=99)
    report_pb = worker_pb2.Report(
        session=7,
        steps=[worker_pb2.StepRecord(kind=77), known, worker_pb2.StepRecord()],
        events=[worker_pb2.SessionEvent(kind=77)],
        num_lost=4,
    )
    report = codec_reports.report_from_pb(over_the_wire(report_pb))
    assert report == Report(session=7, steps=(StepRecord(kind=StepKind.VERIFY, step=5),), num_lost=7)


def test_a_host_of_any_length_is_cut():
    told = ProcessInfo(host="h" * 5000, pid=3, version="v" * 5000)
    hello = codec_hello.hello_from_pb(codec_hello.hello_to_pb(Hello(protocol_version=1, incarnation=2, process=told)))
    assert (len(hello.process.host), hello.process.pid, len(hello.process.version)) == (1024, 3, 1024)


def test_a_wrong_message_costs_only_itself():
    batch_pb = worker_pb2.Batch(
        sequence=1,
        opens=[an_open_pb(session=1), an_open_pb(session=2, num_prompt_tokens=0), an_open_pb(session=3)],
        commits=[a_commit_pb(session=4, origins=[])],
        failures=[worker_pb2.Failed(session=5, code=0)],
        reports=[worker_pb2.Report(session=6, since_open_ms=-1.0), worker_pb2.Report(session=7)],
    )
    batch, rejected = codec.batch_from_pb(batch_pb, LIMITS)
    assert [message.session for message in batch.opens] == [1, 3]
    assert [report.session for report in batch.reports] == [7]
    assert [(rejection.session, rejection.kind) for rejection in rejected] == [
        (2, Open),
        (4, Commit),
        (5, Failed),
        (6, Report),
    ]
    assert str(rejected[0].error).startswith("session 2: Open: num_prompt_tokens")


@given(st.binary(max_size=300))
def test_bytes_that_parse_never_raise(data):
    try:
        batch_pb = worker_pb2.Batch.FromString(data)
    except Exception:
        return  # not a message: gRPC's own error
    codec.batch_from_pb(batch_pb, LIMITS)


def test_a_prompt_beyond_the_context_is_refused_before_it_is_copied():
    tokens = np.ones(1_000_000, dtype=np.uint32)
    open_pb = an_open_pb()
    open_pb.tokens.extend(tokens.tolist())
    with pytest.raises(InvalidRequestError, match="1000003 ids are more than the context of 200"):
        codec.open_from_pb(open_pb, LIMITS)


def test_long_texts_of_our_own_are_cut_when_sent():
    batch = Batch(
        sequence=1,
        failures=(Failed(session=1, code=ErrorCode.INTERNAL, message="x" * 100_000),),
        closes=(Close(session=2, reason="y" * 100_000),),
    )
    batch_pb = codec.batch_to_pb(batch)
    assert len(batch_pb.failures[0].message) == codec.MAX_TEXT_LENGTH
    assert len(batch_pb.closes[0].reason) == codec.MAX_TEXT_LENGTH


def test_a_model_without_a_vocabulary_is_refused():
    with pytest.raises(InvalidRequestError, match="no vocabulary"):
        codec_hello.hello_from_pb(worker_pb2.Hello(model=common_pb2.ModelInfo(name="m", max_context=5)))


def test_a_relayed_extension_leaves_as_it_came_but_for_its_session_and_draft_step():
    came = codec.extension_to_pb(
        Extension(session=7, base=3, parents=(0, 1), tokens=(4, 5), confidences=(0.5, 0.25), draft_step=3)
    )
    limits = codec.Limits(relays_extensions=True)
    batch, rejected = codec.batch_from_pb(worker_pb2.Batch(sequence=1, extensions=[came]), limits)
    (relayed,) = batch.extensions
    assert not rejected
    assert (relayed.session, relayed.base, relayed.draft_step, relayed.tokens) == (7, 3, 3, ())
    assert relayed.num_nodes == len(relayed.read().tokens) > 0
    left = codec.extension_to_pb(dataclasses.replace(relayed, session=9, draft_step=1))
    came.session, came.draft_step = 9, 1
    assert left == came


def test_a_relayed_extension_is_of_bounded_size():
    came = worker_pb2.Extension(session=7, base=3, tokens=[1] * 100_000)
    limits = codec.Limits(relays_extensions=True)
    batch, rejected = codec.batch_from_pb(worker_pb2.Batch(sequence=1, extensions=[came]), limits)
    assert not batch.extensions
    assert [rejection.session for rejection in rejected] == [7]


@pytest.mark.parametrize("what", ["an unknown field", "proposals"])
def test_a_relayed_extension_is_of_bounded_size_whatever_it_carries(what):
    """Nobody reads it on its way, and it travels in a message that others' extensions and opens share."""
    came = worker_pb2.Extension(session=7, base=3, tokens=[1], parents=[0], confidences=[0.5])
    if what == "proposals":
        came.proposals.add(parent=0, tokens=range(300_000))
    else:
        field_1000_of_600_000_bytes = bytes([0xC2, 0x3E, 0xC0, 0xCF, 0x24])
        came = worker_pb2.Extension.FromString(came.SerializeToString() + field_1000_of_600_000_bytes + bytes(600_000))
    limits = codec.Limits(relays_extensions=True)
    batch, rejected = codec.batch_from_pb(worker_pb2.Batch(sequence=1, extensions=[came]), limits)
    assert not batch.extensions
    assert [rejection.session for rejection in rejected] == [7]


def test_what_a_relayed_extension_weighs_counts_in_its_batch():
    """The bytes of one batch stay far below what a message may have, whoever drafts, and for however many sessions."""
    came = worker_pb2.Extension(base=3, tokens=[1] * 4096, parents=range(4096), confidences=[0.5] * 4096)
    limits = codec.Limits(relays_extensions=True)
    outbox = Outbox()
    for session in range(1, 65):
        came.session = session
        batch, _ = codec.batch_from_pb(worker_pb2.Batch(sequence=1, extensions=[came] * 32), limits)
        for extension in batch.extensions:
            outbox.put(extension)
    num_sent = 0
    while (taken := outbox.take()) is not None:
        assert codec.batch_to_pb(taken).ByteSize() < 4 * 2**20
        num_sent += len(taken.extensions)
    assert num_sent == 64 * 32


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_a_time_that_cannot_be_is_no_time(value):
    """A heartbeat's is taken for none; sums of all others stay finite."""
    heartbeat = heartbeat_from_pb(worker_pb2.Heartbeat(step=4, step_running_ms=value))
    assert heartbeat == Heartbeat(step=4, step_running_ms=0.0)
    for message in (
        worker_pb2.Batch(extensions=[worker_pb2.Extension(session=7, draft_share_ms=value)]),
        worker_pb2.Batch(commits=[worker_pb2.Commit(session=7, stats=worker_pb2.RoundStats(step_ms=value))]),
        worker_pb2.Batch(reports=[worker_pb2.Report(session=7, since_open_ms=value)]),
    ):
        _, rejected = codec.batch_from_pb(message, codec.Limits())
        assert [rejection.session for rejection in rejected] == [7]
