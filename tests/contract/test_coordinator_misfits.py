"""Workers whose models or tokenizers do not fit: refused in a sentence; and those that fit although they differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_cluster import (
    VOCAB_SIZE,
    VOCABULARY,
    Worker,
    ask,
    cluster,
    draft_model,
    plain,
    target_model,
)

from coordinator.events import Kind
from specpipe.engine.vocabulary import Vocabulary
from specpipe.errors import ModelMismatchError
from specpipe.testing import TableModel
from specpipe.types import Mode

DRAFT = Kind.DRAFT


async def test_a_draft_worker_with_another_tokenizer_is_refused_at_start() -> None:
    wrong = Worker("draft", draft_model(tokenizer_fingerprint="other"))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with cluster(drafts=[wrong]):
            pass
    assert caught.group_contains(ModelMismatchError, match="their tokenizers differ")


async def test_a_draft_worker_with_more_tokens_than_the_target_drafts_and_proposes_none_of_them() -> None:
    """Ids and tokens go on where the target's end, as with special tokens that were added to a draft."""
    larger = TableModel(VOCAB_SIZE + 3000, 20_000, 5, spread=0.1, order=2, max_context=512)
    tokens = {**VOCABULARY.tokens, **{VOCAB_SIZE + extra: f"<|{extra}|>" for extra in range(3000)}}
    draft = Worker("draft", larger, vocabulary=Vocabulary(tokens))
    async with cluster([Worker("target", target_model(), vocabulary=VOCABULARY)], [draft]) as service:
        answer = await service.client.answer(ask(mode=Mode.SYNC), timeout_s=60)
        assert answer.token_ids == await plain(service)
        assert answer.finished is not None
        assert answer.finished.speculation.drafted_tokens > 0
        assert service.targets[0].service.num_rejected == 0


async def test_a_draft_worker_that_has_other_tokens_is_refused_with_the_first_id_named() -> None:
    swapped = {**VOCABULARY.tokens, 300: VOCABULARY.tokens[301], 301: VOCABULARY.tokens[300]}
    wrong = Worker("draft", draft_model(tokenizer_fingerprint="swapped"), vocabulary=Vocabulary(swapped))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with cluster([Worker("target", target_model(), vocabulary=VOCABULARY)], [wrong]):
            pass
    assert caught.group_contains(
        ModelMismatchError, match=r"cannot draft for table-1: .* id 300 is '.*' for the target"
    )


async def test_a_draft_worker_with_another_tokenizer_that_comes_later_is_not_used() -> None:
    async with cluster() as service:
        await service.drafts[0].stop()
        service.drafts[0].model.info = replace(service.drafts[0].model.info, tokenizer_fingerprint="other")
        await service.drafts[0].start()
        answer = await service.client.answer(ask(mode=Mode.SYNC), timeout_s=60)
        assert answer.token_ids == await plain(service)
        assert not len(service.coordinator.pools[DRAFT])


async def test_target_workers_must_serve_one_model() -> None:
    targets = [Worker("target", target_model()), Worker("target", target_model(fingerprint="bf16"))]
    with pytest.raises(BaseExceptionGroup) as caught:
        async with cluster(targets):
            pass
    assert caught.group_contains(ModelMismatchError, match="another model or dtype")


async def test_a_tokenizer_that_is_not_the_targets_is_refused_at_start() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with cluster([Worker("target", target_model(tokenizer_fingerprint="x"))], []):
            pass
    assert caught.group_contains(ModelMismatchError, match="does not fit the target model")
