"""A step as rank 0 announces it: flat integers, and of each session's slot list only what is new.

Owns: the encoding, and the lists that both ends keep to make it short. Must not know: sockets, models.

Both ends apply the same announcements in the same order, so what they remember is equal; it is bounded by forgetting
the session that was announced least recently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np

from specpipe.engine.interface import SessionRows, StepBatch
from specpipe.errors import InvariantError

MAX_REMEMBERED = 1024  # sessions
_INT = np.dtype("<i8")


class _SlotLists:
    """The slots of each session as last announced."""

    def __init__(self) -> None:
        self._lists: OrderedDict[int, list[int]] = OrderedDict()

    def get(self, session: int) -> list[int]:
        return self._lists.get(session, [])

    def put(self, session: int, slots: list[int]) -> None:
        self._lists[session] = slots
        self._lists.move_to_end(session)
        if len(self._lists) > MAX_REMEMBERED:
            self._lists.popitem(last=False)


class Encoder:
    """Rank 0's end."""

    def __init__(self) -> None:
        self._known = _SlotLists()

    def encode(self, batch: StepBatch) -> bytes:
        """NOTE: every batch that is encoded must be announced to every rank, in this order."""
        values: list[int] = [len(batch.sessions)]
        for rows in batch.sessions:
            self._append(values, rows)
        return np.array(values, dtype=_INT).tobytes()

    def _append(self, values: list[int], rows: SessionRows) -> None:
        slots, known = list(rows.context_slots), self._known.get(rows.session)
        num_kept = _common_length(known, slots)
        self._known.put(rows.session, slots)
        num_words = _num_words(len(rows.tree_slots))
        values += (rows.session, num_kept, len(slots) - num_kept, rows.num_computed, rows.num_committed_rows)
        values += (len(rows.tokens), len(rows.tree_slots), len(rows.tree_rows), len(rows.wants_logits))
        for part in (slots[num_kept:], rows.tokens, rows.tree_slots, rows.tree_rows, rows.tree_positions):
            values += part
        for mask in rows.tree_visible:
            values += np.frombuffer(mask.to_bytes(8 * num_words, "little"), dtype=_INT).tolist()
        values += map(int, rows.wants_logits)


class Decoder:
    """The other ranks' end."""

    def __init__(self) -> None:
        self._known = _SlotLists()

    def decode(self, payload: bytes) -> StepBatch:
        """Raises InvariantError if it is no announcement, or cannot be of this order of announcements."""
        values = iter(decode_slots(payload))
        try:
            batch = StepBatch(sessions=[self._read(values) for _ in range(next(values))])
        except StopIteration:
            raise InvariantError("an announced step ends in the middle") from None
        if next(values, None) is not None:
            raise InvariantError("an announced step has more than it says")
        return batch

    def _read(self, values: Iterator[int]) -> SessionRows:
        session, num_kept, num_new, num_computed, num_committed = _take(values, 5)
        num_rows, num_tree_slots, num_tree_rows, num_wants = _take(values, 4)
        known = self._known.get(session)
        if not 0 <= num_kept <= len(known):
            raise InvariantError(f"session {session}: {num_kept} slots are said to be known, {len(known)} are")
        slots = known[:num_kept] + _take(values, num_new)
        self._known.put(session, slots)
        return SessionRows(
            session=session,
            context_slots=slots,
            num_computed=num_computed,
            tokens=_take(values, num_rows),
            num_committed_rows=num_committed,
            tree_slots=_take(values, num_tree_slots),
            tree_rows=_take(values, num_tree_rows),
            tree_positions=_take(values, num_tree_slots),
            tree_visible=[_read_mask(values, _num_words(num_tree_slots)) for _ in range(num_tree_rows)],
            wants_logits=[bool(value) for value in _take(values, num_wants)],
        )


def encode_slots(slots: Sequence[int]) -> bytes:
    return np.array(slots, dtype=_INT).tobytes()


def decode_slots(payload: bytes) -> list[int]:
    """Raises InvariantError."""
    if len(payload) % _INT.itemsize:
        raise InvariantError(f"{len(payload)} bytes are no whole number of slots")
    slots: list[int] = np.frombuffer(payload, dtype=_INT).tolist()
    return slots


def _take(values: Iterator[int], count: int) -> list[int]:
    return [next(values) for _ in range(count)]


def _num_words(num_bits: int) -> int:
    return (num_bits + 63) // 64


def _read_mask(values: Iterator[int], num_words: int) -> int:
    return int.from_bytes(np.array(_take(values, num_words), dtype=_INT).tobytes(), "little")


def _common_length(known: list[int], slots: list[int]) -> int:
    """How far the lists agree. Nearly always the known one is the other's beginning, which is compared at once."""
    if known == slots[: len(known)]:
        return len(known)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, slots, strict=False)))
