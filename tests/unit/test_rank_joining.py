"""What a rank of another host says of itself, what is compared, and the proofs that both ends know the token. Pure."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpipe.engine.parallel.joining import Claim, JoinRequest, check_claim, seal, unseal
from specpipe.engine.parallel.meeting import Meeting
from specpipe.errors import ConfigError, InvalidRequestError, InvariantError

TOKEN = "a secret of this group"
CHALLENGE, NONCE = b"c" * 32, b"n" * 32
RANK_0 = Claim(rank=0, size=3, model="big", fingerprint="f" * 32, device="cpu", specpipe="0.1.0", torch="2.13.0")
RANK_1 = dataclasses.replace(RANK_0, rank=1)


def request(claim: Claim = RANK_1, token: str = TOKEN) -> JoinRequest:
    return JoinRequest.from_bytes(JoinRequest.create(claim, token, CHALLENGE, NONCE).to_bytes())


def test_a_claim_arrives_as_it_was_made_and_is_proven() -> None:
    assert request().is_proven(TOKEN, CHALLENGE)
    assert request().claim() == RANK_1
    check_claim(RANK_0, request().claim())


def test_the_token_does_not_travel() -> None:
    assert TOKEN.encode() not in JoinRequest.create(RANK_1, TOKEN, CHALLENGE, NONCE).to_bytes()
    assert TOKEN.encode() not in seal(TOKEN, CHALLENGE + NONCE, b"hello")


def test_a_claim_is_proven_by_this_token_for_this_challenge_and_as_it_was_made() -> None:
    assert not request(token="another secret of them").is_proven(TOKEN, CHALLENGE)
    assert not request().is_proven(TOKEN, b"d" * 32), "an old request, sent again"
    changed = dataclasses.replace(request(), claim_bytes=request(dataclasses.replace(RANK_1, rank=2)).claim_bytes)
    assert not changed.is_proven(TOKEN, CHALLENGE)


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"size": 2}, ("one of 2 ranks", "one of 3")),
        ({"rank": 0}, ("rank 0 cannot join", "1 to 2")),
        ({"rank": 3}, ("rank 3 cannot join", "1 to 2")),
        ({"rank": -1}, ("rank -1 cannot join", "1 to 2")),
        ({"model": "small", "fingerprint": "e" * 32}, ("small (eeeeeeeeeeee)", "big (ffffffffffff)")),
        ({"device": "cuda"}, ("runs on cuda", "rank 0 on cpu")),
        ({"specpipe": "0.2.0"}, ("specpipe 0.2.0", "rank 0 of 0.1.0")),
        ({"torch": "2.12.1"}, ("torch 2.12.1", "rank 0 2.13.0")),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_with_what_both_have(
    theirs: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        check_claim(RANK_0, dataclasses.replace(RANK_1, **theirs))
    assert all(part in str(error.value) for part in named), error.value


@pytest.mark.parametrize(
    "claim_bytes",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"{}",
        json.dumps({**dataclasses.asdict(RANK_1), "more": 1}).encode(),
        json.dumps({**dataclasses.asdict(RANK_1), "rank": "1"}).encode(),
        json.dumps({**dataclasses.asdict(RANK_1), "rank": True}).encode(),
        json.dumps({**dataclasses.asdict(RANK_1), "model": None}).encode(),
    ],
)
def test_a_claim_that_is_none_is_refused_even_if_it_is_proven(claim_bytes: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="a request to join"):
        JoinRequest(NONCE, b"p" * 32, claim_bytes).claim()


@given(st.binary(max_size=200))
def test_no_bytes_are_a_proven_request(payload: bytes) -> None:
    try:
        request = JoinRequest.from_bytes(payload)
    except InvalidRequestError:
        return
    assert not request.is_proven(TOKEN, CHALLENGE)


def test_rank_0_shows_that_it_knows_the_token_too() -> None:
    sealed = seal(TOKEN, CHALLENGE + NONCE, b"hello")
    assert unseal(TOKEN, CHALLENGE + NONCE, sealed) == b"hello"
    for payload in (sealed[:-1], b"x" + sealed[1:], b"", JoinRequest.create(RANK_1, TOKEN, CHALLENGE, NONCE).proof):
        with pytest.raises(ConfigError, match="token"):
            unseal(TOKEN, CHALLENGE + NONCE, payload)
    with pytest.raises(ConfigError, match="token"):
        unseal(TOKEN, NONCE + CHALLENGE, sealed)


def test_a_meeting_says_who_shares_a_host() -> None:
    meeting = Meeting(hosts=("10.0.0.1", "10.0.0.2", "10.0.0.1"), port=7)
    assert Meeting.from_bytes(meeting.to_bytes(), 3) == meeting
    assert [meeting.num_on_host_of(rank) for rank in range(3)] == [2, 1, 2]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"hosts": ["a"], "port": 1}',
        b'{"hosts": [1, 2], "port": 1}',
        b'{"hosts": ["a", "b"]}',
        b'{"hosts": ["a", "b"], "port": "1"}',
        b'{"hosts": 2, "port": 1}',
    ],
)
def test_a_meeting_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(InvariantError, match="no meeting of 2 ranks"):
        Meeting.from_bytes(payload, 2)
