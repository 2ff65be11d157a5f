"""Ranks come together over real sockets; strangers of every kind are refused with a sentence and disturb nobody."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from specpipe.engine.parallel import rendezvous as rendezvous_module
from specpipe.engine.parallel.channel import Channel, Frame, Kind
from specpipe.engine.parallel.joining import PROTOCOL, Claim, JoinRequest
from specpipe.engine.parallel.rendezvous import Rendezvous, Seal, join
from specpipe.errors import ConfigError, SpecpipeError, WorkerUnavailableError

TOKEN = "a secret of this group"
RANK_0 = Claim(rank=0, size=3, model="big", fingerprint="f" * 32, device="cpu", specpipe="0.1.0", torch="2.13.0")
RANK_1 = dataclasses.replace(RANK_0, rank=1)
PATIENCE_S = 60.0
NEVER = threading.Event()


class Hall:
    """A rank 0 that has nothing but its rendezvous, and takes each rank once."""

    def __init__(self) -> None:
        self.rendezvous = Rendezvous("127.0.0.1:0", TOKEN, RANK_0)
        self.channels: dict[int, Channel] = {}
        self.rendezvous.open(self._admit)
        self.address = f"127.0.0.1:{self.rendezvous.port}"

    def join(self, claim: Claim = RANK_1, token: str = TOKEN) -> tuple[Channel, bytes]:
        return join(self.address, token, claim, patience_s=PATIENCE_S, is_over=NEVER)

    def dial(self) -> socket.socket:
        """As a stranger."""
        return socket.create_connection(("127.0.0.1", self.rendezvous.port), timeout=PATIENCE_S)

    def _admit(self, rank: int, channel: Channel, seal: Seal) -> None:
        if rank in self.channels:
            raise WorkerUnavailableError(f"rank {rank} has joined already")
        self.channels[rank] = channel
        channel.send(Kind.HELLO, 0, seal(f"hello {rank}".encode()))

    def close(self) -> None:
        self.rendezvous.close()
        for channel in self.channels.values():
            channel.close()


@pytest.fixture
def hall() -> Iterator[Hall]:
    with closing(Hall()) as found:
        yield found


def test_ranks_join_in_any_order_and_are_told_their_own(hall: Hall) -> None:
    for rank in (2, 1):
        channel, hello = hall.join(dataclasses.replace(RANK_0, rank=rank))
        with closing(channel):
            assert hello == f"hello {rank}".encode()
            hall.channels[rank].send(Kind.STEP, 5, b"x" * 10_000)
            assert channel.receive(PATIENCE_S) == Frame(Kind.STEP, 5, b"x" * 10_000)


def test_a_rank_waits_for_a_rank_0_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "DIAL_AGAIN_S", 0.01)
    with socket.socket() as taken:  # bound, and nobody listens: dialling is refused
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WorkerUnavailableError, match=f"rank 1 could not reach rank 0 at {address}"):
            join(address, TOKEN, RANK_1, patience_s=0.1, is_over=NEVER)
        joined: list[tuple[Channel, bytes]] = []
        waiting = threading.Thread(
            target=lambda: joined.append(join(address, TOKEN, RANK_1, patience_s=PATIENCE_S, is_over=NEVER))
        )
        waiting.start()
        taken.listen()
        late, _ = taken.accept()
        late.close()  # a rank 0 that ends as it is dialled is dialled again
        again, _ = taken.accept()
        with closing(again):
            channel = Channel(again)
            channel.send(Kind.CHALLENGE, PROTOCOL, b"c" * 32)
            frame = channel.receive(PATIENCE_S)
            assert frame is not None
            nonce = JoinRequest.from_bytes(frame.payload).nonce
            channel.send(Kind.HELLO, 0, rendezvous_module.seal(TOKEN, b"c" * 32 + nonce, b"welcome"))
            waiting.join(PATIENCE_S)
    ((ours, hello),) = joined
    ours.close()
    assert hello == b"welcome"


def test_a_rank_that_is_asked_to_end_waits_no_longer() -> None:
    is_over = threading.Event()
    is_over.set()
    with pytest.raises(WorkerUnavailableError, match="asked to end"):
        join("127.0.0.1:1", TOKEN, RANK_1, patience_s=PATIENCE_S, is_over=is_over)


def test_a_rank_with_another_token_is_refused(hall: Hall) -> None:
    with pytest.raises(ConfigError, match=f"rank 0 at {hall.address} refuses: the token of this rank is not"):
        hall.join(token="a secret of another group")
    assert not hall.channels


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ({"size": 2}, "rank 1 is one of 2 ranks, rank 0 one of 3"),
        ({"rank": 7}, "rank 7 cannot join"),
        ({"fingerprint": "0" * 32}, "rank 1 has the model big"),
        ({"specpipe": "9"}, "rank 1 is of specpipe 9, rank 0 of 0.1.0"),
    ],
)
def test_a_rank_that_does_not_fit_hears_why(hall: Hall, theirs: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        hall.join(dataclasses.replace(RANK_1, **theirs))  # type: ignore[arg-type]
    assert not hall.channels


def test_a_second_rank_of_a_number_is_refused_and_the_first_stays(hall: Hall) -> None:
    first, _ = hall.join()
    with closing(first):
        with pytest.raises(WorkerUnavailableError, match="rank 1 has joined already"):
            hall.join()
        hall.channels[1].send(Kind.PING)
        assert first.receive(PATIENCE_S) == Frame(Kind.PING)


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + b"r" * 64,
    "no join": b"\x05" + b"\0" * 12,
    "too long": b"\x0c" + b"\0" * 8 + (1 << 20).to_bytes(4, "little") + b"x" * 100,
    "too short": b"\x0c" + b"\0" * 8 + (5).to_bytes(4, "little") + b"short",
    "unproven": b"\x0c" + b"\0" * 8 + (100).to_bytes(4, "little") + b"x" * 100,
    "pickle": b"\x0c" + b"\0" * 8 + (80).to_bytes(4, "little") + b"cos\nsystem\n(S'false'\ntR.".ljust(80),
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_turned_away_and_ranks_still_join(hall: Hall, said: bytes) -> None:
    with hall.dial() as stranger:
        stranger.sendall(said)
        while stranger_hears(stranger):
            continue
    channel, _ = hall.join()
    channel.close()


def stranger_hears(stranger: socket.socket) -> bytes:
    """Nothing, once it was turned away."""
    try:
        return stranger.recv(4096)
    except ConnectionResetError:
        return b""


def test_a_silent_stranger_keeps_nobody_waiting_and_is_turned_away(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "INTRODUCTION_TIMEOUT_S", 0.2)
    with hall.dial() as silent:
        channel, _ = hall.join()
        channel.close()
        while stranger_hears(silent):
            continue


def test_no_more_than_so_many_strangers_are_borne(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "MAX_STRANGERS", 2)
    first, second = hall.dial(), hall.dial()
    with first, second:
        assert first.recv(1)
        assert second.recv(1)
        with hall.dial() as third:
            assert not stranger_hears(third)
    channel, _ = hall.join()  # dials until there is room again
    channel.close()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no rank 0"),
        (b"\x0b" + (PROTOCOL + 1).to_bytes(8, "little") + (32).to_bytes(4, "little") + b"c" * 32, "version 2"),
        (b"\x07" + b"\0" * 12, "is no rank 0: it said PING first"),
    ],
)
def test_a_rank_that_dials_something_else_says_so(said: bytes, sentence: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            end, _ = listener.accept()
            end.sendall(said)
            with end:
                while stranger_hears(end):
                    continue

        answering = threading.Thread(target=answer)
        answering.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=sentence):
            join(address, TOKEN, RANK_1, patience_s=PATIENCE_S, is_over=NEVER)
        answering.join(PATIENCE_S)


def test_a_rank_0_that_does_not_know_the_token_is_not_followed() -> None:
    """Who has taken rank 0's address takes no rank."""

    class Impostor(Hall):
        def _admit(self, rank: int, channel: Channel, seal: Seal) -> None:
            self.channels[rank] = channel
            channel.send(Kind.HELLO, 0, b"x" * 32 + b"{}")

    with closing(Impostor()) as impostor, pytest.raises(ConfigError, match="does not know the token"):
        impostor.join()


def test_a_port_that_is_taken_is_named(hall: Hall) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen for ranks on {hall.address}"):
        Rendezvous(hall.address, TOKEN, RANK_0).open(lambda *_: None)


def test_after_the_end_nobody_is_let_in(hall: Hall) -> None:
    hall.close()
    hall.close()
    with pytest.raises(SpecpipeError, match="could not reach rank 0"):
        join(hall.address, TOKEN, RANK_1, patience_s=0.0, is_over=NEVER)
