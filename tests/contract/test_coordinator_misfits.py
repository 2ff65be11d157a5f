"""Workers whose models or tokenizers do not fit: refused in a sentence; and those that fit although they differ."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_cluster import (
    DEMO,
    VOCAB_SIZE,
    VOCABULARY,
    Worker,
    ask,
    cluster,
    draft_model,
    plain,
    target_model,
)
from waiting import wait_until

from coordinator import links
from coordinator.events import Kind
from coordinator.links import name_worker
from coordinator.pools import Backoff
from coordinator.service import SERVICE_NAME, App
from specpipe.client import GenerateClient
from specpipe.config import CoordinatorConfig, ServerConfig
from specpipe.engine.vocabulary import Vocabulary
from specpipe.errors import ConfigError, ModelMismatchError, WorkerUnavailableError
from specpipe.server import create_server
from specpipe.testing import TableModel
from specpipe.types import Mode
from specpipe.worker_client import WorkerLink

DRAFT = Kind.DRAFT
NOBODY = "127.0.0.1:9"


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


async def test_targets_that_were_all_replaced_by_another_model_are_told_what_to_do_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster([Worker("target", target_model())], []) as service:
        (target,) = service.targets
        await target.stop()
        target.model.info = replace(target.model.info, fingerprint="new")
        await target.start()
        await wait_until(lambda: "fingerprint new" in caplog.text, timeout_s=30)
    (said,) = {r.getMessage() for r in caplog.records if "fingerprint new" in r.getMessage()}
    assert said.startswith(f"target worker {target.address} serves another model or dtype: ")
    assert said.endswith(
        "a coordinator keeps the model of the first target worker that it meets until it is started again; "
        "it is dialled again"
    )
    gone = [r.getMessage() for r in caplog.records if r.name == "coordinator.links" and "is gone" in r.getMessage()]
    assert all(said.count(target.address) == 1 for said in gone)


async def test_problems_that_come_by_turns_are_told_once_each_and_again_after_a_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "next_s", lambda self: 0.02)
    tried: list[str] = []

    def connect(address: str, kind: Kind, incarnation: int) -> AbstractAsyncContextManager[WorkerLink]:
        tried.append(address)
        raise WorkerUnavailableError("the connection broke" if len(tried) % 2 else "it is no specpipe service")

    def times_told(problem: str) -> int:
        return sum(f"{problem}; it is dialled again" in record.getMessage() for record in caplog.records)

    async with cluster() as service:
        (draft,), dialling = service.drafts, service.coordinator._links
        work = dialling._connect
        dialling._connect = connect
        await draft.stop()
        await wait_until(lambda: len(tried) > 10, timeout_s=30)
        assert (times_told("the connection broke"), times_told("it is no specpipe service")) == (1, 1)
        dialling._connect = work
        await draft.start()
        await wait_until(lambda: len(dialling.pools[DRAFT]) == 1, timeout_s=30)
        dialling._connect = connect
        await draft.stop()
        await wait_until(lambda: len(tried) > 20, timeout_s=30)
    assert times_told("the connection broke") == 2


async def test_coordinators_that_lost_a_worker_at_the_same_moment_dial_it_at_different_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled = {links.spread(4.0) for _ in range(10)}
    assert len(dialled) > 1
    assert min(dialled) >= 2.0
    assert max(dialled) <= 4.0
    waits: list[float] = []
    monkeypatch.setattr(links, "spread", lambda wait_s: waits.append(wait_s) or 0.0)
    async with create_app(DEMO).running():
        await wait_until(lambda: len(waits) > 3)
    assert waits[:4] == [1, 2, 4, 4]


async def test_a_service_that_starts_says_what_it_waits_for() -> None:
    async with cluster(must_be_ready=False) as service:
        with pytest.raises(WorkerUnavailableError, match=r"still starting: (no target|it waits for|its tokenizer)"):
            await service.client.answer(ask(), timeout_s=60)
        await wait_until(lambda: len(service.coordinator.pools[DRAFT]) == 1)
        with pytest.raises(WorkerUnavailableError, match="still starting: its tokenizer is being loaded"):
            await service.client.answer(ask(), timeout_s=60)


async def test_a_service_without_a_target_worker_says_what_is_wrong_with_it() -> None:
    app = create_app(DEMO)
    async with app.running(), GenerateClient(app.server.address) as client:
        await wait_until(lambda: "nothing listens" in app.coordinator.awaited, timeout_s=30)
        with pytest.raises(WorkerUnavailableError) as raised:
            await client.answer(ask(), timeout_s=60)
    assert f"still starting: no target worker is connected (target worker {NOBODY}: nothing" in str(raised.value)


def create_app(tokenizer: Path) -> App:
    """A coordinator whose target worker is not there."""
    config = CoordinatorConfig(targets=(NOBODY,), tokenizer=str(tokenizer))
    return App(config, create_server(ServerConfig(), [SERVICE_NAME]))


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        ("nothing listens there", "target worker a:1: nothing listens there"),
        ("worker a:1 is gone: it stops", "target worker a:1 is gone: it stops"),
        ("target worker a:1 serves another model", "target worker a:1 serves another model"),
        ("the link to worker a:1 broke", "the link to worker a:1 broke"),
    ],
)
def test_a_problem_names_its_worker_once(problem: str, sentence: str) -> None:
    assert name_worker(Kind.TARGET, "a:1", problem) == sentence


async def test_a_tokenizer_that_does_not_exist_is_told_before_any_worker_is_there(tmp_path: Path) -> None:
    app = create_app(tmp_path)
    async with app.running():
        with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
            await asyncio.wait_for(app.wait_ready(), 60)


async def test_a_model_whose_tokenizer_nobody_names_or_finds_is_told_with_the_flag_that_helps() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with cluster([Worker("target", target_model(name="no such model"))], [], tokenizer=""):
            pass
    assert caught.group_contains(ConfigError, match="no tokenizer could be loaded.* with --tokenizer")


async def test_a_tokenizer_that_is_not_the_targets_is_refused_at_start() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with cluster([Worker("target", target_model(tokenizer_fingerprint="x"))], []):
            pass
    assert caught.group_contains(ModelMismatchError, match="does not fit the target model")


async def test_a_tokenizer_found_by_the_models_name_is_refused_if_an_id_is_another_token() -> None:
    """No flag names it, so nothing but what was loaded can tell."""
    swapped = {**VOCABULARY.tokens, 300: VOCABULARY.tokens[301], 301: VOCABULARY.tokens[300]}
    model = target_model(name=str(DEMO), tokenizer_fingerprint="swapped")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with cluster([Worker("target", model, vocabulary=Vocabulary(swapped))], [], tokenizer=""):
            pass
    assert caught.group_contains(ModelMismatchError, match=r"does not fit .*: id 300 is '.*' in it and .* --tokenizer")


async def test_a_tokenizer_that_knows_more_ids_than_the_target_and_none_differently_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A target worker that cannot tell now is asked again."""
    read, failures = WorkerLink.read_vocabulary, [WorkerUnavailableError("not now")]

    async def read_or_fail(link: WorkerLink, num_ids: int) -> Vocabulary | None:
        if failures:
            raise failures.pop()
        return await read(link, num_ids)

    monkeypatch.setattr(WorkerLink, "read_vocabulary", read_or_fail)
    tokens = {i: token for i, token in VOCABULARY.tokens.items() if i != 300}
    model = target_model(tokenizer_fingerprint="other")
    async with cluster([Worker("target", model, vocabulary=Vocabulary(tokens))], []) as service:
        assert (await service.client.answer(ask(), timeout_s=60)).token_ids == await plain(service)
    assert not failures
