"""Announced steps arrive as they were, whatever the order of sessions and however their slots change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specpipe.engine.interface import SessionRows, StepBatch
from specpipe.engine.parallel import announce
from specpipe.engine.parallel.announce import Decoder, Encoder, decode_slots, encode_slots

INTS = st.integers(0, 2**40)


@st.composite
def sessions(draw: st.DrawFn) -> SessionRows:
    num_slots, num_rows, num_tree = draw(st.integers(0, 6)), draw(st.integers(1, 4)), draw(st.integers(0, 200))
    num_tree_rows = draw(st.integers(0, min(3, num_tree)))
    return SessionRows(
        session=draw(st.integers(1, 3)),
        context_slots=draw(st.lists(st.integers(1, 3), min_size=num_slots, max_size=num_slots)),
        num_computed=draw(INTS),
        tokens=draw(st.lists(INTS, min_size=num_rows, max_size=num_rows)),
        num_committed_rows=draw(INTS),
        tree_slots=list(range(num_tree)),
        tree_rows=draw(st.lists(INTS, min_size=num_tree_rows, max_size=num_tree_rows)),
        tree_positions=list(range(7, 7 + num_tree)),
        tree_visible=draw(st.lists(st.integers(0, 2**num_tree - 1), min_size=num_tree_rows, max_size=num_tree_rows)),
        wants_logits=draw(st.lists(st.booleans(), max_size=3)),
    )


@given(batches=st.lists(st.lists(sessions(), min_size=1, max_size=3, unique_by=lambda rows: rows.session), max_size=6))
def test_batches_arrive_as_they_were(batches: list[list[SessionRows]]) -> None:
    encoder, decoder = Encoder(), Decoder()
    for rows in batches:
        assert decoder.decode(encoder.encode(StepBatch(sessions=rows))) == StepBatch(sessions=rows)


def test_only_new_slots_travel() -> None:
    encoder = Encoder()

    def announced(num_slots: int) -> int:
        rows = SessionRows(
            session=1,
            context_slots=range(1, num_slots + 1),
            num_computed=num_slots - 1,
            tokens=[5],
            num_committed_rows=1,
            wants_logits=[True],
        )
        return len(encoder.encode(StepBatch(sessions=[rows])))

    assert announced(4000) > 4000
    assert announced(4001) < 120


def test_sessions_that_are_forgotten_are_announced_whole_again() -> None:
    encoder, decoder = Encoder(), Decoder()
    for session in [*range(announce.MAX_REMEMBERED + 5), 0, 3, announce.MAX_REMEMBERED]:
        rows = SessionRows(session=session, context_slots=[1, 2, 3], num_computed=2, tokens=[4], num_committed_rows=1)
        assert decoder.decode(encoder.encode(StepBatch(sessions=[rows]))).sessions[0].context_slots == [1, 2, 3]


def test_slots_to_clear_arrive() -> None:
    assert decode_slots(encode_slots([3, 1, 2**40])) == [3, 1, 2**40]
