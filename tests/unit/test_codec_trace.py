"""Every span survives the wire; what a service gets wrong about one is refused in one sentence."""

import string
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpipe import codec_trace
from specpipe.errors import SpecpipeError
from specpipe.rpc.v1 import trace_pb2
from specpipe.spans import KeptTrace, Process, Role, Span, SpanEvent, SpanKind

u64 = st.integers(1, 2**64 - 1)
names = st.text(string.ascii_lowercase + "._ ", min_size=1, max_size=20)
int64s = st.integers(-(2**63), 2**63 - 1)
reals = st.floats(allow_nan=False)
values = st.one_of(
    st.text(max_size=20),
    st.booleans(),
    int64s,
    reals,
    st.lists(st.text(max_size=5), max_size=3).map(tuple),
    st.lists(int64s, min_size=1, max_size=3).map(tuple),
    st.lists(reals, min_size=1, max_size=3).map(tuple),
)
attributes = st.dictionaries(names, values, max_size=4)
processes = st.builds(
    Process,
    role=st.sampled_from(Role),
    address=names,
    host=names,
    pid=st.integers(0, 2**32 - 1),
    version=names,
    incarnation=u64,
)
events = st.builds(SpanEvent, name=names, unix_nanos=u64, attributes=attributes)


@st.composite
def spans(draw: st.DrawFn, trace_id: int) -> Span:
    start, end = sorted((draw(u64), draw(u64)))
    name = draw(st.sampled_from(["generate", "round", "verify", "draft"]))
    return Span(
        name=name,
        trace_id=trace_id,
        span_id=draw(u64),
        parent_id=draw(st.integers(0, 2**64 - 1)),
        kind=SpanKind.SERVER if name == "generate" else SpanKind.INTERNAL,
        process=draw(processes),
        start_unix_nanos=start,
        end_unix_nanos=end,
        attributes=draw(attributes),
        events=tuple(draw(st.lists(events, max_size=3))),
        links=tuple(draw(st.lists(u64, max_size=3))),
        error=draw(st.text(max_size=10)),
    )


@st.composite
def traces(draw: st.DrawFn) -> KeptTrace:
    trace_id = draw(st.integers(1, 2**128 - 1))
    return KeptTrace(
        trace_id=trace_id, is_complete=draw(st.booleans()), spans=tuple(draw(st.lists(spans(trace_id), max_size=4)))
    )


@given(traces())
def test_a_trace_comes_back_as_it_was(trace: KeptTrace) -> None:
    sent = codec_trace.trace_to_pb(trace).SerializeToString()
    assert codec_trace.trace_from_pb(trace_pb2.GetTraceResponse.FromString(sent)) == trace


def span(**changes: object) -> Span:
    plain: dict[str, object] = {
        "name": "verify",
        "trace_id": 7,
        "span_id": 8,
        "process": Process(role=Role.TARGET_WORKER),
        "start_unix_nanos": 1,
        "end_unix_nanos": 2,
    }
    return Span(**{**plain, **changes})  # type: ignore[arg-type]


def sent_back(value: Span) -> Span:
    trace = KeptTrace(trace_id=7, is_complete=True, spans=(value,))
    return codec_trace.trace_from_pb(codec_trace.trace_to_pb(trace)).spans[0]


def test_a_seed_beyond_63_bits_arrives_as_a_text() -> None:
    assert sent_back(span(attributes={"seed": 2**64 - 1})).attributes == {"seed": str(2**64 - 1)}


def test_lists_of_mixed_numbers_arrive_as_reals() -> None:
    assert sent_back(span(attributes={"rank_ms": (1, 2.5)})).attributes == {"rank_ms": (1.0, 2.5)}


def test_a_value_of_a_kind_that_is_not_known_is_left_out() -> None:
    trace_pb = codec_trace.trace_to_pb(KeptTrace(trace_id=7, is_complete=True, spans=(span(),)))
    trace_pb.spans[0].attributes["new"].CopyFrom(trace_pb2.AttributeValue())
    assert codec_trace.trace_from_pb(trace_pb).spans[0].attributes == {}


def _no_hexadecimal_id(trace_pb: trace_pb2.GetTraceResponse) -> None:
    trace_pb.trace_id = "x" * 32


def _no_span_id(trace_pb: trace_pb2.GetTraceResponse) -> None:
    trace_pb.spans[0].span_id = 0


def _backwards(trace_pb: trace_pb2.GetTraceResponse) -> None:
    trace_pb.spans[0].end_unix_nanos = 0


def _many_links(trace_pb: trace_pb2.GetTraceResponse) -> None:
    trace_pb.spans[0].links.extend([1] * (codec_trace.MAX_LINKS + 1))


def _many_events(trace_pb: trace_pb2.GetTraceResponse) -> None:
    trace_pb.spans[0].events.extend([trace_pb2.SpanEvent()] * (codec_trace.MAX_EVENTS + 1))


def _many_attributes(trace_pb: trace_pb2.GetTraceResponse) -> None:
    for index in range(codec_trace.MAX_ATTRIBUTES + 1):
        trace_pb.spans[0].attributes[str(index)].truth = True


def _long_name(trace_pb: trace_pb2.GetTraceResponse) -> None:
    trace_pb.spans[0].name = "n" * (codec_trace.MAX_NAME + 1)


def _unknown_role(trace_pb: trace_pb2.GetTraceResponse) -> None:
    trace_pb.spans[0].process.role = "referee"


def _long_list(trace_pb: trace_pb2.GetTraceResponse) -> None:
    trace_pb.spans[0].attributes["all"].numbers.values.extend([1] * (codec_trace.MAX_LIST + 1))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_no_hexadecimal_id, "its id is not 32 hexadecimal digits"),
        (_no_span_id, "a span has no id"),
        (_backwards, "a span named 'verify' ends before it starts"),
        (_many_links, "4097 links of a span, more than 4096"),
        (_many_events, "4097 events of a span, more than 4096"),
        (_many_attributes, "257 attributes of a span, more than 256"),
        (_long_name, "1025 characters of a span's name, more than 1024"),
        (_unknown_role, "role 'referee'"),
        (_long_list, "65537 values of an attribute, more than 65536"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(spoil: Callable[[trace_pb2.GetTraceResponse], None], reason: str) -> None:
    trace_pb = codec_trace.trace_to_pb(KeptTrace(trace_id=7, is_complete=True, spans=(span(),)))
    spoil(trace_pb)
    with pytest.raises(SpecpipeError, match=reason) as refused:
        codec_trace.trace_from_pb(trace_pb)
    assert str(refused.value).startswith("the service sent a trace that cannot be read: ")
