"""What one forward pass does, as index arrays: rows, slots to write, and attention groups with their masks.

Owns: turning a StepBatch into numpy arrays, once a step. Must not know: torch, models, layers.

Attention is computed by groups: decode and tree rows of sessions with similar context lengths form one padded batch,
each prefill chunk is a group of its own. Visibility compares positions and tree bits, never slots. Padding keys name
slot 0 (scratch, always finite) and are masked; padding rows see everything and are thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpipe.engine.interface import SessionRows, StepBatch
from specpipe.errors import InvalidRequestError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MAX_DECODE_ROWS = 16  # a longer run of committed rows is a prefill chunk
_CALL_COST = 1000  # what one more attention call costs, in (row, key) pairs
_MANY = 1 << 40
_SLOT_DTYPE = np.int64


@dataclass(slots=True, kw_only=True)
class Part:
    """Rows of one session that attend together."""

    first_row: int  # in the flattened batch; its rows are consecutive
    positions: IntArray  # [num_rows]
    key_slots: IntArray  # [num_keys]
    key_positions: IntArray  # [num_keys]
    visible: BoolArray  # [num_rows, num_keys], before windows

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def num_keys(self) -> int:
        return len(self.key_slots)


@dataclass(slots=True, kw_only=True)
class Group:
    """Parts padded to one shape [num_parts, num_rows, num_keys]."""

    parts: list[Part]
    num_rows: int
    num_keys: int

    @property
    def key_slots(self) -> IntArray:
        """[num_parts, num_keys], padded with slot 0."""
        slots = np.zeros((len(self.parts), self.num_keys), dtype=_SLOT_DTYPE)
        for index, part in enumerate(self.parts):
            slots[index, : part.num_keys] = part.key_slots
        return slots

    @property
    def key_range(self) -> tuple[int, int] | None:
        """(first slot, end) if there is one part and its keys are neighbours in order: then a view will do."""
        slots = self.parts[0].key_slots
        if len(self.parts) > 1 or slots[-1] - slots[0] + 1 != len(slots) or (np.diff(slots) != 1).any():
            return None
        return int(slots[0]), int(slots[-1]) + 1

    @property
    def rows(self) -> IntArray:
        """[num_parts * num_rows]: row of the flattened batch, 0 for padding."""
        rows = np.zeros((len(self.parts), self.num_rows), dtype=np.int64)
        for index, part in enumerate(self.parts):
            rows[index, : part.num_rows] = part.first_row + np.arange(part.num_rows)
        return rows.reshape(-1)

    @property
    def is_real(self) -> BoolArray:
        """[num_parts * num_rows]: False for padding rows."""
        counts = np.array([part.num_rows for part in self.parts])
        return (np.arange(self.num_rows) < counts[:, None]).reshape(-1)

    def visible(self, window: int | None) -> BoolArray:
        """[num_parts, num_rows, num_keys]: which keys each row sees, within `window` positions if given."""
        visible = np.zeros((len(self.parts), self.num_rows, self.num_keys), dtype=np.bool_)
        for index, part in enumerate(self.parts):
            seen = part.visible
            if window is not None:
                seen = seen & (part.key_positions > part.positions[:, None] - window)
            visible[index, : part.num_rows, : part.num_keys] = seen
            visible[index, part.num_rows :] = True
        return visible


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """A step, ready to become tensors."""

    tokens: IntArray  # [num_rows]
    positions: IntArray  # [num_rows]
    write_slots: IntArray  # [num_rows]
    wanted: IntArray  # [num_wanted] rows whose logits are returned
    groups: list[Group]


def plan_step(batch: StepBatch, max_group_keys: int = _MANY) -> StepArrays:
    """Flatten `batch`. Raises InvalidRequestError if a session's rows contradict one another.

    Groups of several parts have at most `max_group_keys` keys in all (what fits a cache, where that matters).
    """
    tokens: list[int] = []
    positions: list[IntArray] = []
    write_slots: list[IntArray] = []
    wanted: list[int] = []
    parts: list[Part] = []
    for rows in batch.sessions:
        _check_rows(rows)
        first_row = len(tokens)
        tokens.extend(rows.tokens)
        wanted.extend(first_row + row for row, wants in enumerate(rows.wants_logits) if wants)
        for part, slots in _parts_of(rows, first_row):
            positions.append(part.positions)
            write_slots.append(slots)
            parts.append(part)
    if not tokens:
        raise InvalidRequestError("a step needs at least one row")
    return StepArrays(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.concatenate(positions),
        write_slots=np.concatenate(write_slots),
        wanted=np.array(wanted, dtype=np.int64),
        groups=group_parts(parts, max_group_keys),
    )


def group_parts(parts: Sequence[Part], max_keys: int = _MANY) -> list[Group]:
    """Pad parts of similar shape together where that costs less than separate calls."""
    groups: list[list[Part]] = []
    work = 0
    for part in sorted(parts, key=lambda part: (part.num_rows > MAX_DECODE_ROWS, part.num_keys)):
        if groups and _fits(groups[-1], part, work, max_keys):
            groups[-1].append(part)
        else:
            groups.append([part])
            work = 0
        work += part.num_rows * part.num_keys + _CALL_COST
    return [_pad(sorted(members, key=lambda part: part.first_row)) for members in groups]


def _fits(members: Sequence[Part], part: Part, work: int, max_keys: int) -> bool:
    num_rows = max(part.num_rows, *(member.num_rows for member in members))
    num_keys = (len(members) + 1) * part.num_keys  # padded: parts come by ascending number of keys
    return num_keys <= max_keys and num_rows * num_keys <= work + part.num_rows * part.num_keys


def _pad(members: list[Part]) -> Group:
    num_rows = max(part.num_rows for part in members)
    return Group(parts=members, num_rows=num_rows, num_keys=max(part.num_keys for part in members))


def _parts_of(rows: SessionRows, first_row: int) -> list[tuple[Part, IntArray]]:
    """The parts of one session in row order, each with the slots it writes."""
    context = np.asarray(rows.context_slots, dtype=_SLOT_DTYPE)
    num_committed = rows.num_committed_rows
    if not rows.tree_rows:
        return [_committed_part(rows, context, first_row)]
    if num_committed <= MAX_DECODE_ROWS:
        return [_mixed_part(rows, context, first_row)]
    tree_only = _tree_part(rows, context, first_row + num_committed)
    return [_committed_part(rows, context, first_row), tree_only]


def _committed_part(rows: SessionRows, context: IntArray, first_row: int) -> tuple[Part, IntArray]:
    end = rows.num_computed + rows.num_committed_rows
    positions = np.arange(rows.num_computed, end)
    key_positions = np.arange(end)
    part = Part(
        first_row=first_row,
        positions=positions,
        key_slots=context[:end],
        key_positions=key_positions,
        visible=key_positions <= positions[:, None],
    )
    return part, context[rows.num_computed : end]


def _tree_part(rows: SessionRows, context: IntArray, first_row: int) -> tuple[Part, IntArray]:
    tree_slots = np.asarray(rows.tree_slots, dtype=_SLOT_DTYPE)
    tree_positions = np.asarray(rows.tree_positions, dtype=np.int64)
    own = np.asarray(rows.tree_rows, dtype=np.int64)
    bits = _unpack_bits(rows.tree_visible, len(tree_slots))
    part = Part(
        first_row=first_row,
        positions=tree_positions[own],
        key_slots=np.concatenate((context, tree_slots)),
        key_positions=np.concatenate((np.arange(len(context)), tree_positions)),
        visible=np.concatenate((np.ones((len(own), len(context)), dtype=np.bool_), bits), axis=1),
    )
    return part, tree_slots[own]


def _mixed_part(rows: SessionRows, context: IntArray, first_row: int) -> tuple[Part, IntArray]:
    """Committed rows and tree rows over one set of keys."""
    tree, tree_writes = _tree_part(rows, context, first_row)
    if rows.num_committed_rows == 0:
        return tree, tree_writes
    committed, committed_writes = _committed_part(rows, context, first_row)
    sees_no_node = np.zeros((committed.num_rows, tree.num_keys - committed.num_keys), dtype=np.bool_)
    part = Part(
        first_row=first_row,
        positions=np.concatenate((committed.positions, tree.positions)),
        key_slots=tree.key_slots,
        key_positions=tree.key_positions,
        visible=np.concatenate((np.concatenate((committed.visible, sees_no_node), axis=1), tree.visible)),
    )
    return part, np.concatenate((committed_writes, tree_writes))


def _unpack_bits(masks: Sequence[int], num_bits: int) -> BoolArray:
    """[len(masks), num_bits]: bit k of each mask."""
    num_bytes = (num_bits + 7) // 8
    packed = b"".join((mask & ((1 << num_bits) - 1)).to_bytes(num_bytes, "little") for mask in masks)
    grid = np.frombuffer(packed, dtype=np.uint8).reshape(len(masks), num_bytes)
    return np.unpackbits(grid, axis=1, count=num_bits, bitorder="little").view(np.bool_)


def _check_rows(rows: SessionRows) -> None:
    num_tree = len(rows.tree_rows)
    end = rows.num_computed + rows.num_committed_rows
    has_shape = (
        len(rows.tokens) == rows.num_committed_rows + num_tree
        and len(rows.tree_visible) == num_tree
        and len(rows.tree_positions) == len(rows.tree_slots)
        and len(rows.wants_logits) in (0, len(rows.tokens))
        and len(rows.context_slots) >= end
        and (not num_tree or len(rows.context_slots) == end)
        and len(rows.tokens) > 0
    )
    if not has_shape:
        raise InvalidRequestError(f"session {rows.session}: rows, slots and positions of a step do not fit together")
