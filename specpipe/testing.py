"""A model without weights for tests and simulators: it checks every row it is given.

Owns: `TableModel`, a `StepModel` whose logits are a hash of the exact sequence that a row sees, rebuilt from the slots.
Must not know: torch, gRPC, schedulers. A batch that a real engine would answer wrongly without noticing (a slot read
before it was written, computed under another prefix, named by two sessions) raises AssertionError here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpipe.engine.interface import SessionRows, StepBatch
from specpipe.errors import InvalidRequestError
from specpipe.types import ModelInfo

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
_MAX_CACHED_ROWS = 20_000

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a slot holds: a token, its position, and a digest of the whole prefix under which it was computed."""

    token: int
    position: int
    digest: int
    is_nan: bool = False


class TableModel:
    """A deterministic random language model over `vocab_size` ids that checks what it is asked to compute.

    `seed` picks the model; `spread` is the standard deviation of its logits (larger: more certain). With `order` n only
    the last n tokens decide the logits, so that text repeats and probabilities can be counted; None: all tokens do.
    """

    rank_ms: Sequence[float] = ()

    def __init__(
        self,
        vocab_size: int = 32,
        num_slots: int = 4096,
        seed: int = 0,
        *,
        spread: float = 2.0,
        order: int | None = None,
        max_context: int = 4096,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.info = ModelInfo(
            name=f"table-{seed}",
            fingerprint=f"table-{seed}-{vocab_size}-{spread}-{order}",
            tokenizer_fingerprint=f"table-{vocab_size}",
            vocab_size=vocab_size,
            max_context=max_context,
            eos_token_ids=eos_token_ids,
        )
        self.num_slots = num_slots
        self.num_forwards = 0
        self.num_rows = 0  # rows computed so far
        self.last_batch: StepBatch | None = None
        self._seed = seed
        self._spread = spread
        self._order = order
        self._teacher: TableModel | None = None
        self._agreement = 0.0
        self._entries: dict[int, _Entry] = {}
        self._nan_sequences: set[tuple[int, ...]] = set()
        self._cache: dict[tuple[int, ...], Logits] = {}

    @classmethod
    def like(cls, other: TableModel, agreement: float, *, num_slots: int = 4096, seed: int = 1) -> TableModel:
        """A draft for `other`: it has the same logits after a share `agreement` of all sequences, else its own.

        `seed` picks one of the drafts that `other` has.
        """
        draft = cls(
            other.info.vocab_size,
            num_slots,
            _digest([seed], other._seed),
            spread=other._spread,
            order=other._order,
            max_context=other.info.max_context,
            eos_token_ids=other.info.eos_token_ids,
        )
        draft.info = dataclasses.replace(draft.info, name=f"{other.info.name}-draft-{seed}")
        draft._teacher = other
        draft._agreement = agreement
        return draft

    def poison(self, tokens: Iterable[int]) -> None:
        """The row that ends exactly this sequence will hold NaN, logits and slot, and so will all rows after it."""
        self._nan_sequences.add(tuple(tokens))

    def logits_of(self, tokens: Sequence[int]) -> Logits:
        """The oracle: logits [vocab] after this whole sequence."""
        if any(tuple(tokens[: len(prefix)]) == prefix for prefix in self._nan_sequences):
            return np.full(self.info.vocab_size, np.nan, np.float32)
        key = tuple(tokens if self._order is None else tokens[-self._order :])
        if (known := self._cache.get(key)) is None:
            if len(self._cache) >= _MAX_CACHED_ROWS:
                self._cache.clear()
            known = self._cache[key] = self._compute(key)
        return known

    def forward(self, batch: StepBatch) -> Logits:
        """See `StepModel.forward`. Raises AssertionError where the batch contradicts what the slots hold."""
        _require(bool(batch.sessions), "an empty step")
        self._check_sharing(batch)
        wanted = [row for rows in batch.sessions for row in self._forward_session(rows)]
        self.num_forwards += 1
        self.num_rows += batch.num_rows
        self.last_batch = batch
        return np.stack(wanted) if wanted else np.zeros((0, self.info.vocab_size), np.float32)

    def clear_slots(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._entries.pop(slot, None)

    def _compute(self, key: tuple[int, ...]) -> Logits:
        if self._teacher is not None and _uniform(_digest(key, self._seed ^ 0xA5A5)) < self._agreement:
            return self._teacher.logits_of(key)
        hashes = _mix(np.uint64(_digest(key, self._seed)) ^ np.arange(1, self.info.vocab_size + 1, dtype=np.uint64))
        share = ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
        logistic = np.log(share) - np.log1p(-share)  # standard deviation pi / sqrt(3)
        logits: Logits = (logistic * (self._spread * np.sqrt(3.0) / np.pi)).astype(np.float32)
        return logits

    def _check_sharing(self, batch: StepBatch) -> None:
        """Sessions may share computed context slots (a prefix) and nothing else; each slot is written by one row."""
        sessions = [rows.session for rows in batch.sessions]
        _require(len(set(sessions)) == len(sessions), f"a session twice in one step: {sessions}")
        owner: dict[int, int] = {}
        for rows in batch.sessions:
            own = [*rows.context_slots[rows.num_computed :], *rows.tree_slots]
            _require(len(set(own)) == len(own), f"session {rows.session} names a slot twice: {own}")
            for slot in own:
                _require(slot not in owner, f"slot {slot} belongs to sessions {owner.get(slot)} and {rows.session}")
                owner[slot] = rows.session
        for rows in batch.sessions:
            for slot in rows.context_slots[: rows.num_computed]:
                _require(slot not in owner, f"session {rows.session} reads slot {slot}, a drafted one")

    def _forward_session(self, rows: SessionRows) -> list[Logits]:
        self._check_shape(rows)
        context, digest = self._read_context(rows)
        results: list[Logits | None] = [None] * len(rows.tokens)
        for i in range(rows.num_committed_rows):
            digest = self._write(rows, rows.context_slots[len(context)], rows.tokens[i], len(context), digest)
            context.append(rows.tokens[i])
            results[i] = self._answer(rows, i, context, rows.context_slots[len(context) - 1])
        by_position = sorted(range(len(rows.tree_rows)), key=lambda j: rows.tree_positions[rows.tree_rows[j]])
        for j in by_position:
            row = rows.num_committed_rows + j
            path = self._compute_tree_row(rows, j, len(context), digest)
            results[row] = self._answer(rows, row, [*context, *path], rows.tree_slots[rows.tree_rows[j]])
        return [row for row in results if row is not None]

    def _check_shape(self, rows: SessionRows) -> None:
        name = f"session {rows.session}"
        num_committed, num_tree = rows.num_committed_rows, len(rows.tree_rows)
        _require(len(rows.tokens) == num_committed + num_tree > 0, f"{name}: {len(rows.tokens)} tokens, other rows")
        _require(len(rows.tree_visible) == num_tree, f"{name}: tree_visible needs one entry a tree row")
        _require(len(rows.tree_positions) == len(rows.tree_slots), f"{name}: tree_positions needs one entry a slot")
        _require(len(rows.wants_logits) in (0, len(rows.tokens)), f"{name}: wants_logits needs one entry a row")
        end, num_context = rows.num_computed + num_committed, len(rows.context_slots)
        _require(num_context == end or (num_context > end and not num_tree), f"{name}: {num_context} context slots")
        _require(end > 0, f"{name}: tree rows without a committed token")
        for token in rows.tokens:
            _require(0 <= token < self.info.vocab_size, f"{name}: token {token} outside the vocabulary")
        for slot in (*rows.context_slots, *rows.tree_slots):
            _require(0 < slot < self.num_slots, f"{name}: slot {slot} outside 1..{self.num_slots - 1}")
        deepest = max([end, *(p + 1 for p in rows.tree_positions)])
        if deepest > self.info.max_context:
            raise InvalidRequestError(f"{name}: position {deepest - 1} is beyond {self.info.max_context}")

    def _read_context(self, rows: SessionRows) -> tuple[list[int], int]:
        """Tokens of the computed committed positions and their digest, checked slot by slot."""
        tokens: list[int] = []
        digest = self._seed_digest
        for position, slot in enumerate(rows.context_slots[: rows.num_computed]):
            entry = self._read(rows, slot, position)
            digest = _step(digest, entry.token)
            if entry.digest != digest:
                raise AssertionError(f"session {rows.session}: slot {slot} was computed under another prefix")
            tokens.append(entry.token)
        return tokens, digest

    def _compute_tree_row(self, rows: SessionRows, j: int, base: int, digest: int) -> list[int]:
        """Write tree row j; returns the tokens of its path from the base, itself included."""
        own = rows.tree_rows[j]
        bits = rows.tree_visible[j]
        _require(bits >> len(rows.tree_slots) == 0, f"session {rows.session}: row {j} sees an unknown tree slot")
        _require(bool(bits >> own & 1), f"session {rows.session}: tree row {j} does not see itself")
        seen = sorted((k for k in range(len(rows.tree_slots)) if bits >> k & 1), key=lambda k: rows.tree_positions[k])
        positions = [rows.tree_positions[k] for k in seen]
        _require(
            positions == list(range(base, base + len(seen))) and seen[-1] == own,
            f"session {rows.session}: tree row {j} sees positions {positions} below a base of {base}",
        )
        path = []
        for k in seen[:-1]:
            entry = self._read(rows, rows.tree_slots[k], rows.tree_positions[k])
            digest = _step(digest, entry.token)
            _require(entry.digest == digest, f"session {rows.session}: tree row {j} sees a node of another path")
            path.append(entry.token)
        token = rows.tokens[rows.num_committed_rows + j]
        self._write(rows, rows.tree_slots[own], token, positions[-1], digest)
        return [*path, token]

    def _read(self, rows: SessionRows, slot: int, position: int) -> _Entry:
        entry = self._entries.get(slot)
        if entry is None:
            raise AssertionError(f"session {rows.session}: slot {slot} is read before it was written")
        if entry.position != position:
            raise AssertionError(f"session {rows.session}: slot {slot} holds position {entry.position}, not {position}")
        return entry

    def _write(self, rows: SessionRows, slot: int, token: int, position: int, digest: int) -> int:
        entry = self._entries.get(slot)
        _require(
            entry is None or not entry.is_nan,
            f"session {rows.session}: slot {slot} may hold NaN and was not cleared before it was used again",
        )
        digest = _step(digest, token)
        self._entries[slot] = _Entry(token, position, digest)
        return digest

    def _answer(self, rows: SessionRows, row: int, sequence: list[int], slot: int) -> Logits | None:
        if self._nan_sequences and np.isnan(self.logits_of(sequence)[0]):
            self._entries[slot] = dataclasses.replace(self._entries[slot], is_nan=True)
        wants = bool(rows.wants_logits) and rows.wants_logits[row]
        return self.logits_of(sequence) if wants else None

    @property
    def _seed_digest(self) -> int:
        return self._seed & _MASK


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _step(digest: int, token: int) -> int:
    digest = ((digest ^ (token + 1)) * _ODD) & _MASK
    return digest ^ (digest >> 29)


def _digest(tokens: Iterable[int], seed: int) -> int:
    digest = (seed * _ODD + 1) & _MASK
    for token in tokens:
        digest = _step(digest, token)
    return digest


def _uniform(digest: int) -> float:
    return float(_step(_step(digest, 7), 11) >> 11) / 2.0**53


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
