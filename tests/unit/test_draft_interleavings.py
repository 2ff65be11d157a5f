"""Any interleaving of opens, commits, misses, losses, closes, pauses and steps keeps the draft worker's invariants.

The model checks that each row sees exactly its own path; the harness checks slots and trees after every event; at the
end of each run every fan equals what a fresh draft on the same prefix would rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from draft_harness import (
    LINK,
    Harness,
    assert_drafts_are_the_models_own,
    close_message,
    commit_message,
    open_message,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from report_books import DraftBook

from specpipe.reports import Report
from specpipe.testing import TableModel
from specpipe.types import Closed, Extension, Failed, Mode, NeedTokens, Open

VOCAB = 8
EVENTS = st.lists(
    st.tuples(st.sampled_from(["open", "hit", "miss", "double", "lose", "close", "pause", "step", "step", "step"]),
              st.integers(0, 2**16)),
    min_size=1,
    max_size=60,
)  # fmt: skip


@dataclass
class Peer:
    """What the coordinator holds of one session."""

    opened: Open
    tokens: list[int]
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.book = DraftBook(self.opened)


class World:
    """A coordinator that sends what a real one might, and checks what comes back."""

    def __init__(self, num_slots: int, max_context: int) -> None:
        self.harness = Harness(
            TableModel(VOCAB, num_slots, seed=1, max_context=max_context),
            max_sessions=3,
            max_batch_tokens=12,
            max_nodes=24,
            max_depth=6,
        )
        self.peers: dict[int, Peer] = {}
        self.is_paused = False

    def apply(self, event: str, value: int) -> None:
        if event == "open":
            self.open(value)
        elif event == "step":
            self.harness.step()
        elif event == "pause":
            self.is_paused = not self.is_paused
            self.harness.loop.link_paused(LINK, self.is_paused)
        elif live := [peer for peer in self.peers.values() if not peer.is_closed]:
            getattr(self, event)(live[value % len(live)], value // 7)
        self.receive()

    def open(self, value: int) -> None:
        session = len(self.peers) + 1
        tokens = [(value + i) % VOCAB for i in range(1 + value % 40)]
        mode = Mode.SYNC if value % 3 == 0 else Mode.PIPELINED
        opened = open_message(
            session, tokens, mode=mode, temperature=value % 2 * 0.8, seed=value, wants_reports=value % 4 > 0
        )
        self.peers[session] = Peer(opened, tokens)
        self.harness.receive(opened)

    def hit(self, peer: Peer, value: int) -> None:
        """Commit along the draft's own tree, as deep as it goes, then something else."""
        known = self.harness.loop._sessions.get((LINK, peer.opened.session))
        path = []
        if known is not None:
            node = known.tree.root
            while node.children and len(path) < 1 + value % 5:
                node = list(node.children.values())[value % len(node.children)]
                path.append(node.token)
        self.commit(peer, path or [value % VOCAB])

    def miss(self, peer: Peer, value: int) -> None:
        self.commit(peer, [(value + i * i) % VOCAB for i in range(1 + value % 4)])

    def double(self, peer: Peer, value: int) -> None:
        base = max(1, len(peer.tokens) - value % 6)
        self.harness.receive(commit_message(peer.opened.session, base, peer.tokens[base:]))

    def lose(self, peer: Peer, value: int) -> None:
        """A commit that never arrives."""
        peer.tokens.append(value % VOCAB)

    def close(self, peer: Peer, value: int) -> None:
        peer.is_closed = True
        self.harness.receive(close_message(peer.opened.session))

    def commit(self, peer: Peer, tokens: list[int]) -> None:
        base = len(peer.tokens)
        peer.tokens += tokens
        self.harness.receive(commit_message(peer.opened.session, base, tokens, next_budget=len(tokens) * 2))

    def receive(self) -> None:
        for message in self.harness.take():
            peer = self.peers[message.session]
            peer.book.take(message)
            if isinstance(message, Report):
                continue
            if isinstance(message, Closed):
                peer.is_closed = True
            elif isinstance(message, NeedTokens):
                assert message.have < len(peer.tokens)
                missing = peer.tokens[message.have :]
                self.harness.receive(commit_message(message.session, message.have, missing))
            elif isinstance(message, Extension):
                assert not peer.is_closed
                assert message.base <= len(peer.tokens)
            else:
                assert isinstance(message, Failed)
                assert message.is_retryable, message  # no room
        self.check_prefixes()

    def check_prefixes(self) -> None:
        for session in self.harness.loop._sessions.values():
            assert session.tokens == self.peers[session.id].tokens[: len(session.tokens)]


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.sampled_from([120, 400]), st.sampled_from([24, 4096]))
def test_any_interleaving_keeps_the_invariants(events: list[tuple[str, int]], num_slots: int, max_context: int) -> None:
    world = World(num_slots, max_context)
    for event, value in events:
        world.apply(event, value)
    if world.is_paused:
        world.apply("pause", 0)
    world.harness.run()
    world.receive()
    for session in world.harness.loop._sessions.values():
        assert_drafts_are_the_models_own(world.harness, session, world.peers[session.id].opened)
        assert session.num_pending == 0
    for peer in world.peers.values():
        if not peer.is_closed:
            world.close(peer, 0)
    world.receive()
    assert world.harness.loop.heartbeat().num_free_slots == num_slots - 1


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
def test_losing_any_one_commit_is_made_up(mode: Mode) -> None:
    for lost in range(6):
        world = World(400, 4096)
        opened = open_message(1, [1, 2], mode=mode)
        world.peers[1] = Peer(opened, [1, 2])
        world.harness.receive(opened)
        for number in range(8):
            event = "lose" if number == lost else "hit"
            world.apply("step", 0)
            world.apply(event, number)
        world.harness.run()
        assert world.harness.session(1).tokens == world.peers[1].tokens
