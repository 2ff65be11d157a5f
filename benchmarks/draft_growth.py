"""Which growth rules make a draft worker useful: the real draft loop against a simulated target, in virtual time.

Owns: the event simulation behind the defaults of `GrowthRules` (draft_worker.session) and `StepRules` (.scheduler).
Must not know: torch, gRPC. The unit of time is one plain target step.

Run: python benchmarks/draft_growth.py [--tokens N] [--cost 0.1,0.3] [--acceptance 0.75] [--leaves 8]
What it came to with the demo models, in virtual time too: docs/decisions/0011.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from draft_worker.growth import GrowthRules
from draft_worker.scheduler import StepRules
from draft_worker.worker import DraftLoop
from specpipe.calibration import Calibrator
from specpipe.config import DraftWorkerConfig, EngineConfig
from specpipe.testing import TableModel
from specpipe.tree import DraftTree, Node
from specpipe.types import (
    Commit,
    Extension,
    Open,
    Origin,
    SamplingParams,
    SessionMessage,
    SpeculationParams,
    StopRules,
)

PROMPT_LENGTH = 8
NOISE_BY_ACCEPTANCE = {0.6: 0.5, 0.75: 0.33, 0.86: 0.2, 0.9: 0.13}  # spread of the draft's own error


class NoisyModel(TableModel):
    """Logits of a target with positions of varying certainty; a draft of it adds noise of its own."""

    def __init__(self, *, noise: float = 0.0, vocab_size: int = 256, num_slots: int = 8192) -> None:
        super().__init__(vocab_size, num_slots, seed=1, spread=1.0, order=6)
        self._noise = noise
        self._other = TableModel(vocab_size, 2, seed=2, spread=noise, order=6) if noise else None

    def _compute(self, key: tuple[int, ...]) -> npt.NDArray[np.float32]:
        sharpness = np.float32(1.0 + sum(key) % 7)  # from nearly flat to nearly certain
        logits = super()._compute(key)
        if self._other is not None:
            logits = logits + self._other.logits_of(key)
        return np.asarray(logits * sharpness, np.float32)


@dataclass(slots=True)
class Result:
    num_tokens: int = 0
    num_rounds: int = 0
    num_hits: int = 0
    num_judged: int = 0
    num_first: int = 0
    num_verified: int = 0
    rank_of_choice: list[int] = field(default_factory=list)  # where the first guess was wrong; -1: not a child
    draft_steps: int = 0

    def __str__(self) -> str:
        ranks = [sum(0 < rank <= n for rank in self.rank_of_choice) for n in (1, 2, 3, 5)]
        share = [f"{100 * count / max(len(self.rank_of_choice), 1):.0f}" for count in ranks]
        return (
            f"speed {self.num_tokens / max(self.num_rounds, 1):5.2f}"
            f"  hits {self.num_hits / max(self.num_rounds, 1):.2f}"
            f"  a {self.num_first / max(self.num_judged, 1):.2f}  choice among next 1/2/3/5: {'/'.join(share)} %"
            f"  draft steps/round {self.draft_steps / max(self.num_rounds, 1):.1f}"
        )


class Target:
    """One session on a target that verifies the best nodes it holds and never waits."""

    def __init__(self, model: TableModel, opened: Open, max_verified: int) -> None:
        self.session = opened.session
        self.tokens = list(opened.tokens)
        self._model = model
        self._max_verified = max_verified
        self._calibrator = Calibrator()
        self._tree = DraftTree(base=len(self.tokens), max_nodes=4096, estimate=self._calibrator.estimate)
        self._verified: set[Node] = set()
        self.result = Result()

    def graft(self, extension: Extension) -> None:
        self._tree.graft(extension, self.tokens)

    def begin(self) -> None:
        self._verified = set(self._tree.nodes_by_reach()[: self._max_verified])
        self.result.num_hits += bool(self._verified)
        self.result.num_verified += len(self._verified)

    def end(self) -> Commit:
        base, node, new = len(self.tokens), self._tree.root, []
        while True:
            choice = int(np.argmax(self._model.logits_of([*self.tokens, *new])))
            new.append(choice)
            self._judge(node, choice)
            child = node.children.get(choice)
            if child is None or child not in self._verified:
                break
            node = child
        self._tree.advance(new)
        self.tokens += new
        self.result.num_rounds += 1
        self.result.num_tokens += len(new)
        return Commit(
            session=self.session,
            round=self.result.num_rounds,
            base=base,
            tokens=tuple(new),
            origins=(Origin.PLAIN,) * len(new),
            next_budget=self._max_verified,
        )

    def _judge(self, node: Node, choice: int) -> None:
        for child in node.children.values():
            is_choice = child.token == choice
            self._calibrator.observe(child.rank, child.depth, child.confidence, child.drafter, is_choice)
        first = next(iter(node.children.values()), None)
        if first is not None and first in self._verified:
            self.result.num_judged += 1
            self.result.num_first += first.token == choice
            if first.token != choice:
                self.result.rank_of_choice.append(node.children[choice].rank if choice in node.children else -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    acceptance: float = 0.75
    cost: float = 0.1  # draft step / target step
    round_trip: float = 0.006
    num_tokens: int = 400
    num_sessions: int = 1
    max_verified: int = 15  # of all sessions together
    growth: GrowthRules = field(default_factory=GrowthRules)
    steps: StepRules = field(default_factory=StepRules)


class Simulation:
    """Events in virtual time: (time, order, what, payload)."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._now = 0.0
        self._events: list[tuple[float, int, str, object]] = []
        self._order = itertools.count()
        self._outbox: list[SessionMessage] = []
        self._is_draft_idle = True
        self._draft_inbox: list[SessionMessage] = []
        engine = EngineConfig(model="noisy", max_sessions=64)
        self._loop = DraftLoop(
            NoisyModel(noise=NOISE_BY_ACCEPTANCE[setting.acceptance]),
            DraftWorkerConfig(engine=engine),
            lambda _, message: self._outbox.append(message),
            clock=lambda: self._now,
            growth=setting.growth,
            steps=setting.steps,
        )
        target = NoisyModel()
        opens = [_open_message(number) for number in range(1, setting.num_sessions + 1)]
        share = max(setting.max_verified // setting.num_sessions, 1)
        self._targets = {opened.session: Target(target, opened, share) for opened in opens}
        for opened in opens:
            self._at(0.0, "to_draft", opened)
        self._at(1.0, "target_ends", None)

    def run(self) -> list[Result]:
        results = [target.result for target in self._targets.values()]
        while min(result.num_tokens for result in results) < self._setting.num_tokens:
            self._now, _, what, payload = heapq.heappop(self._events)
            getattr(self, f"_{what}")(payload)
        for result in results:
            result.draft_steps = self._loop.heartbeat().step
        return results

    def _at(self, time: float, what: str, payload: object) -> None:
        heapq.heappush(self._events, (time, next(self._order), what, payload))

    def _to_draft(self, message: SessionMessage) -> None:
        self._draft_inbox.append(message)
        if self._is_draft_idle:
            self._draft_turns(None)

    def _draft_turns(self, _: object) -> None:
        for message in self._draft_inbox:
            self._loop.receive(1, message)
        self._draft_inbox.clear()
        has_worked = self._loop.run_once() is not None
        end = self._now + (self._setting.cost if has_worked else 0.0)
        for message in self._outbox:
            self._at(end + self._setting.round_trip / 2, "to_target", message)
        self._outbox.clear()
        self._is_draft_idle = not has_worked
        if has_worked:
            self._at(end, "draft_turns", None)

    def _to_target(self, message: SessionMessage) -> None:
        if isinstance(message, Extension):
            self._targets[message.session].graft(message)

    def _target_ends(self, _: object) -> None:
        for target in self._targets.values():
            self._at(self._now + self._setting.round_trip / 2, "to_draft", target.end())
            target.begin()
        self._at(self._now + 1.0, "target_ends", None)


def _open_message(session: int) -> Open:
    return Open(
        session=session,
        request_id=str(session),
        tokens=tuple((session * 37 + i * 11) % 256 for i in range(PROMPT_LENGTH)),
        num_prompt_tokens=PROMPT_LENGTH,
        sampling=SamplingParams(temperature=0.0),
        stops=StopRules(max_length=1 << 20),
        speculation=SpeculationParams(drafter="model"),
    )


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--cost", type=_floats, default=[0.1, 0.2, 0.4])
    parser.add_argument("--acceptance", type=_floats, default=[0.6, 0.75, 0.86, 0.9])
    parser.add_argument("--leaves", type=int, default=StepRules().num_leaves)
    parser.add_argument("--min-reach", type=float, default=GrowthRules().min_reach)
    parser.add_argument("--fan", type=int, default=GrowthRules().fan)
    parser.add_argument("--per-budget", type=float, default=GrowthRules().wanted_nodes_per_budget)
    parser.add_argument("--min-share", type=float, default=GrowthRules().min_share)
    parser.add_argument("--max-nodes", type=int, default=GrowthRules().max_nodes)
    parser.add_argument("--round-trip", type=float, default=0.006)
    options = parser.parse_args(arguments)
    for acceptance, cost in itertools.product(options.acceptance, options.cost):
        setting = Setting(
            acceptance=acceptance,
            cost=cost,
            round_trip=options.round_trip,
            num_tokens=options.tokens,
            num_sessions=options.sessions,
            growth=GrowthRules(
                max_nodes=options.max_nodes,
                min_reach=options.min_reach,
                min_share=options.min_share,
                fan=options.fan,
                wanted_nodes_per_budget=options.per_budget,
            ),
            steps=StepRules(num_leaves=options.leaves),
        )
        for result in Simulation(setting).run()[:1]:
            sys.stdout.write(f"a {acceptance:.2f}  c {cost:.2f}  {result}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
