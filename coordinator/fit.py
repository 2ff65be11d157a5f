"""Which workers may serve one answer together.

Owns: what the target model is, and the verdict on every tokenizer met. Must not know: pools, sessions, when one dials.

Target workers must be interchangeable: a session moves between them. A draft worker may have any model whose token ids
stand for the target's tokens, by the rule of `specpipe.engine.vocabulary`: the command line applies the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from coordinator.events import Kind
from specpipe.engine.vocabulary import Vocabulary, check_same_vocabulary
from specpipe.errors import ModelMismatchError, WorkerUnavailableError
from specpipe.types import Hello, ModelInfo


class VocabularyLink(Protocol):
    """What is needed of a `specpipe.worker_client.WorkerLink`."""

    hello: Hello

    async def read_vocabulary(self, num_ids: int) -> Vocabulary | None:
        """The tokens of the ids below `num_ids`; None if the worker cannot tell. Raises WorkerUnavailableError."""
        ...


class Fit:
    """The first target worker decides what the others must be. `target_link` gives one of those there are now."""

    def __init__(self, target_link: Callable[[], VocabularyLink | None]) -> None:
        self.model: ModelInfo | None = None
        """The target model, once a target worker was met."""
        self._target_link = target_link
        self._is_known = asyncio.Event()
        self._misfits: dict[str, str] = {}  # by tokenizer fingerprint: in what it differs; "": in nothing that counts

    async def target(self) -> ModelInfo:
        """Returns when a target worker was met."""
        await self._is_known.wait()
        assert self.model is not None
        return self.model

    async def check(self, kind: Kind, address: str, link: VocabularyLink) -> None:
        """Returns if the worker may be used, for a draft worker as soon as the target is known.

        Raises ModelMismatchError if it does not fit, WorkerUnavailableError if that cannot be found out now.
        """
        model = link.hello.model
        assert model is not None  # WorkerLink.connect has checked
        if kind is Kind.TARGET:
            if self.model is None:
                self.model = model
                self._is_known.set()
            check_target(model, self.model, address)
        else:
            await self._check_draft(model, await self.target(), address, link)

    async def _check_draft(self, model: ModelInfo, target: ModelInfo, address: str, link: VocabularyLink) -> None:
        """Most drafts have the target's very tokenizer; only else the two are compared, once for each other one."""
        fingerprint = model.tokenizer_fingerprint
        if fingerprint == target.tokenizer_fingerprint:
            return
        if fingerprint not in self._misfits:
            self._misfits[fingerprint] = await self._compare(target, model, link)
        if self._misfits[fingerprint]:
            raise ModelMismatchError(
                f"draft worker {address} ({model.name}) cannot draft for {target.name}: {self._misfits[fingerprint]}"
            )

    async def _compare(self, target: ModelInfo, model: ModelInfo, link: VocabularyLink) -> str:
        """In what the two differ; "" if in nothing that counts."""
        target_link = self._target_link()
        if target_link is None:
            raise WorkerUnavailableError("no target worker is there to compare tokenizers with")
        theirs = await link.read_vocabulary(target.vocab_size)
        ours = await target_link.read_vocabulary(target.vocab_size)
        if ours is None or theirs is None:
            raise ModelMismatchError(
                f"draft worker {model.name} cannot draft for {target.name}: their tokenizers differ (fingerprints "
                f"{model.tokenizer_fingerprint} and {target.tokenizer_fingerprint}), and a worker cannot tell in what"
            )
        try:
            await asyncio.to_thread(check_same_vocabulary, ours, theirs)
        except ModelMismatchError as error:
            return str(error)
        return ""


def check_tokenizer(name: str, ours: Vocabulary, theirs: Vocabulary | None, target: ModelInfo) -> None:
    """Raise ModelMismatchError if an id stands for one token in the coordinator's tokenizer and another for the target.

    `theirs`: None if the target worker cannot tell. Called where fingerprints differ, which by itself is no fault: a
    loaded tokenizer names a token that a file has twice but once, and either may have ids that the other lacks.
    """
    if theirs is None:
        problem = (
            f"fingerprint {ours.fingerprint} ({ours.size} ids), where the target has {target.tokenizer_fingerprint} "
            f"({target.vocab_size} ids), and its worker cannot tell in what they differ"
        )
    else:
        known = theirs.tokens
        wrong = min((i for i, token in ours.tokens.items() if known.get(i, token) != token), default=None)
        if wrong is None:
            return
        problem = f"id {wrong} is {ours.tokens[wrong]!r} in it and {known[wrong]!r} for the target"
    raise ModelMismatchError(
        f"the tokenizer of {name!r} does not fit the target model {target.name}: {problem}; name a folder with the "
        "target's own with --tokenizer"
    )


def check_target(model: ModelInfo, reference: ModelInfo, address: str) -> None:
    """Raise ModelMismatchError unless sessions may move between this target and those of `reference`."""
    if model.fingerprint != reference.fingerprint:
        raise ModelMismatchError(
            f"target worker {address} serves another model or dtype: fingerprint {model.fingerprint} ({model.name}) "
            f"where the service has {reference.fingerprint} ({reference.name}); a coordinator keeps the model of the "
            "first target worker that it meets until it is started again"
        )
    if model.max_context < reference.max_context:
        raise ModelMismatchError(
            f"target worker {address} has a context of {model.max_context} tokens, and the service promises "
            f"{reference.max_context}; start all target workers with one --max-context and enough slots"
        )
    if model.tokenizer_fingerprint != reference.tokenizer_fingerprint:
        raise ModelMismatchError(
            f"target worker {address} ({model.name}) has another tokenizer than the service's target workers: "
            f"fingerprint {model.tokenizer_fingerprint} where they have {reference.tokenizer_fingerprint}"
        )
