"""What cannot be answered is refused with the right status, names what was wrong, and harms nobody else."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specpipe.answers import Chunk
from specpipe.client import GenerateClient, GenerateRequest
from specpipe.errors import DuplicateRequestError, InvalidRequestError, ModelNotFoundError, SpecpipeError

GOOD = GenerateRequest(prompt="def", temperature=0, max_tokens=4, ignore_eos=True)
NAN = float("nan")

BAD: dict[str, tuple[GenerateRequest, type[SpecpipeError]]] = {
    "no characters": (replace(GOOD, prompt=""), InvalidRequestError),
    "no ids": (replace(GOOD, prompt=()), InvalidRequestError),
    "id out of range": (replace(GOOD, prompt=(1, 320)), InvalidRequestError),
    "huge id": (replace(GOOD, prompt=(2**32 - 1,)), InvalidRequestError),
    "id that does not fit the wire": (replace(GOOD, prompt=(2**40,)), InvalidRequestError),
    "negative id": (replace(GOOD, prompt=(-1,)), InvalidRequestError),
    "prompt as long as the context": (replace(GOOD, prompt=(5,) * 512), InvalidRequestError),
    "prompt of 5 MB": (replace(GOOD, prompt="x " * 2_500_000), InvalidRequestError),
    "temperature nan": (replace(GOOD, temperature=NAN), InvalidRequestError),
    "temperature negative": (replace(GOOD, temperature=-0.1), InvalidRequestError),
    "temperature infinite": (replace(GOOD, temperature=float("inf")), InvalidRequestError),
    "top_p 0": (replace(GOOD, top_p=0.0), InvalidRequestError),
    "top_p above 1": (replace(GOOD, top_p=1.5), InvalidRequestError),
    "top_p nan": (replace(GOOD, top_p=NAN), InvalidRequestError),
    "top_k negative": (replace(GOOD, top_k=-1), InvalidRequestError),
    "min_p above 1": (replace(GOOD, min_p=1.5), InvalidRequestError),
    "max_tokens 0": (replace(GOOD, max_tokens=0), InvalidRequestError),
    "max_tokens negative": (replace(GOOD, max_tokens=-1), InvalidRequestError),
    "stop id out of range": (replace(GOOD, stop_token_ids=(320,)), InvalidRequestError),
    "stop id negative": (replace(GOOD, stop_token_ids=(-1,)), InvalidRequestError),
    "stop id of 63 bits": (replace(GOOD, stop_token_ids=(2**63 - 1,)), InvalidRequestError),
    "empty stop": (replace(GOOD, stop=("",)), InvalidRequestError),
    "K 0": (replace(GOOD, num_speculative_tokens=0), InvalidRequestError),
    "unknown model": (replace(GOOD, model="no-such-model"), ModelNotFoundError),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_refused_and_the_next_request_works(client: GenerateClient, case: str) -> None:
    request, error = BAD[case]
    with pytest.raises(error) as raised:
        await client.answer(request, timeout_s=20)
    assert type(raised.value) is error
    assert str(raised.value)
    assert len((await client.answer(GOOD, timeout_s=20)).token_ids) == 4


async def test_the_id_of_a_live_request_is_refused_and_is_free_again_after(client: GenerateClient) -> None:
    long = replace(GOOD, request_id="twice", max_tokens=300)
    has_begun = asyncio.Event()

    async def first() -> int:
        count = 0
        async for event in client.generate(long):
            has_begun.set()
            count += len(event.token_ids) if isinstance(event, Chunk) else 0
        return count

    running = asyncio.create_task(first())
    await has_begun.wait()
    with pytest.raises(DuplicateRequestError):
        await client.answer(replace(GOOD, request_id="twice"))
    assert await running == 300
    assert len((await client.answer(replace(GOOD, request_id="twice"))).token_ids) == 4
