"""A draft worker in one process, without threads or gRPC: messages in, messages out, and the target's own text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from draft_worker.growth import GrowthRules
from draft_worker.scheduler import StepRules
from draft_worker.session import DraftSession
from draft_worker.worker import DraftLoop
from specpipe.config import DraftWorkerConfig, EngineConfig
from specpipe.sampling.coupled import Chooser
from specpipe.testing import TableModel
from specpipe.tree import DraftTree
from specpipe.types import (
    Close,
    Commit,
    Extension,
    FinishReason,
    Mode,
    Open,
    Origin,
    SamplingParams,
    SessionMessage,
    SpeculationParams,
    StopRules,
)

LINK = 1


class Harness:
    """A `DraftLoop` over a `TableModel`; every call checks the worker's invariants."""

    def __init__(
        self,
        model: TableModel,
        *,
        max_sessions: int = 8,
        max_batch_tokens: int = 64,
        max_nodes: int = 64,
        max_depth: int = 16,
        growth: GrowthRules | None = None,
        steps: StepRules | None = None,
    ) -> None:
        self.model = model
        self.sent: list[tuple[int, SessionMessage]] = []
        config = DraftWorkerConfig(
            engine=EngineConfig(model="table", max_sessions=max_sessions, max_batch_tokens=max_batch_tokens),
            max_nodes=max_nodes,
            max_depth=max_depth,
        )
        ticks = itertools.count()
        self.loop = DraftLoop(
            model,
            config,
            lambda link, message: self.sent.append((link, message)),
            clock=lambda: next(ticks) * 0.001,
            growth=growth,
            steps=steps,
        )

    def receive(self, message: SessionMessage, link: int = LINK) -> None:
        self.loop.receive(link, message)
        self.loop.check()

    def run(self, max_steps: int = 500) -> int:
        """Run until there is nothing to do; returns the number of steps."""
        for step in range(max_steps):
            if self.step() is None:
                return step
        raise AssertionError(f"still busy after {max_steps} steps")

    def step(self) -> float | None:
        result = self.loop.run_once()
        self.loop.check()
        return result

    def take(self, link: int = LINK) -> list[SessionMessage]:
        """Messages sent on a link since the last call."""
        taken = [message for to, message in self.sent if to == link]
        self.sent = [(to, message) for to, message in self.sent if to != link]
        return taken

    def take_extensions(self, link: int = LINK) -> list[Extension]:
        messages = self.take(link)
        assert all(isinstance(message, Extension) for message in messages), messages
        return [message for message in messages if isinstance(message, Extension)]

    def session(self, session: int, link: int = LINK) -> DraftSession:
        return self.loop._sessions[link, session]


def open_message(
    session: int = 1,
    tokens: Sequence[int] = (1, 2, 3),
    *,
    mode: Mode = Mode.PIPELINED,
    temperature: float = 0.0,
    seed: int = 7,
    max_length: int = 1000,
    num_speculative_tokens: int | None = None,
    wants_reports: bool = False,
) -> Open:
    return Open(
        session=session,
        request_id=f"r{session}",
        tokens=tuple(tokens),
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(temperature=temperature, seed=seed),
        stops=StopRules(max_length=max_length),
        speculation=SpeculationParams(mode=mode, num_speculative_tokens=num_speculative_tokens, drafter="model"),
        wants_reports=wants_reports,
    )


def commit_message(
    session: int, base: int, tokens: Iterable[int], *, next_budget: int = 0, finish: FinishReason | None = None
) -> Commit:
    tokens = tuple(tokens)
    return Commit(
        session=session,
        round=1,
        base=base,
        tokens=tokens,
        origins=(Origin.PLAIN,) * len(tokens),
        next_budget=next_budget,
        finish_reason=finish,
    )


def close_message(session: int) -> Close:
    return Close(session=session)


def continuation(model: TableModel, opened: Open, tokens: Sequence[int], count: int) -> list[int]:
    """What `model` alone would say after `tokens` under the request's sampling."""
    chooser = Chooser(opened.sampling, model.info.vocab_size)
    text = list(tokens)
    for _ in range(count):
        text.append(chooser.choose(model.logits_of(text), len(text)))
    return text[len(tokens) :]


def received_tree(opened: Open, tokens: Sequence[int], extensions: Iterable[Extension]) -> DraftTree:
    """The tree a target would hold after these extensions, all for the base `len(tokens)`."""
    tree = DraftTree(base=len(tokens), max_nodes=100_000, max_depth=1000)
    for extension in extensions:
        tree.graft(extension, tokens)
    return tree


def first_path(tree: DraftTree) -> list[int]:
    """Tokens of the path that takes the first-ranked child at every node."""
    path, node = [], tree.root
    while node.children:
        node = next(iter(node.children.values()))
        path.append(node.token)
    return path


def assert_drafts_are_the_models_own(harness: Harness, session: DraftSession, opened: Open) -> None:
    """Every fan in the session's tree is what a fresh draft on that very prefix would rank, and less sure lookups."""
    chooser = Chooser(opened.sampling, harness.model.info.vocab_size)
    for node in (session.tree.root, *session.tree.nodes()):
        if (node.slot is None and node.depth > 0) or not node.children:
            continue
        text = [*session.tokens, *(ancestor.token for ancestor in node.path())]
        ranked = chooser.rank(harness.model.logits_of(text), len(text), GrowthRules().fan)
        children = [(child.token, child.confidence) for child in node.children.values()]
        num_ranked = sum(child in ranked for child in children)
        if session.max_expansions >= GrowthRules().fan:
            assert children[:num_ranked] == ranked[:num_ranked]
        assert all(confidence == ranked[-1][1] / 2 for _, confidence in children[num_ranked:])
