"""Where ranks of several hosts come together: rank 0 listens, the others dial it; whoever does not belong is refused.

Owns: the sockets of that, their time limits, and how many strangers may wait at once. Must not know: what ranks do
when they have joined; who belongs (joining.py).
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable

from specpipe.engine.parallel.channel import Channel, Frame, Kind, tune
from specpipe.engine.parallel.joining import (
    MAX_JOIN_BYTES,
    NONCE_BYTES,
    PROTOCOL,
    Claim,
    JoinRequest,
    check_claim,
    seal,
    unseal,
)
from specpipe.errors import ConfigError, InvalidRequestError, SpecpipeError, WorkerUnavailableError

logger = logging.getLogger(__name__)

MAX_STRANGERS = 32
"""Connections that have not joined yet; more are closed at once."""
INTRODUCTION_TIMEOUT_S = 5.0  # of each message before a rank has joined
DIAL_TIMEOUT_S = 5.0
DIAL_AGAIN_S = 0.5
JOIN_PATIENCE_S = 600.0  # of a rank with a rank 0 that is not there

Seal = Callable[[bytes], bytes]
Admit = Callable[[int, Channel, Seal], None]
"""Called once the claim of a rank is proven and fits: takes the rank, its channel, and what makes the payload of HELLO
from a hello, which it sends. Raises WorkerUnavailableError, with the sentence for the rank, if there is no place."""


class Rendezvous:
    """Rank 0's end. It listens from `open` to `close`."""

    def __init__(self, address: str, token: str, claim: Claim) -> None:
        """`address`: interface and port to listen on, HOST:PORT."""
        self._address = address
        self._token = token
        self._claim = claim
        self._listener: socket.socket | None = None
        self._num_strangers = 0
        self._counting = threading.Lock()

    @property
    def port(self) -> int:
        """Where it listens, while it does."""
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def open(self, admit: Admit) -> None:
        """Raises ConfigError if it cannot listen there."""
        host, port = split(self._address)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=MAX_STRANGERS)
        except OSError as error:
            raise ConfigError(f"cannot listen for ranks on {self._address}: {error.strerror or error}") from None
        threading.Thread(target=self._accept, args=(self._listener, admit), name="rendezvous", daemon=True).start()

    def close(self) -> None:
        """Idempotent."""
        if self._listener is not None:
            try:
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            except OSError:
                logger.debug("the listener of ranks was closed already")
            self._listener.close()

    def _accept(self, listener: socket.socket, admit: Admit) -> None:
        while True:
            try:
                end, (host, *_) = listener.accept()
            except OSError:  # closed
                return
            if not self._count(1):
                end.close()
                continue
            threading.Thread(target=self._receive, args=(end, host, admit), name="stranger", daemon=True).start()

    def _count(self, change: int) -> bool:
        """False if there is no room for another stranger."""
        with self._counting:
            if self._num_strangers + change > MAX_STRANGERS:
                return False
            self._num_strangers += change
            return True

    def _receive(self, end: socket.socket, host: str, admit: Admit) -> None:
        """One connection until it has joined or was refused."""
        try:
            tune(end)
            channel = Channel(end, max_frame_bytes=MAX_JOIN_BYTES)
            self._introduce(channel, host, admit)
        except (SpecpipeError, OSError) as error:
            logger.warning("a connection from %s is no rank of this group: %s", host, error)
            end.close()
        finally:
            self._count(-1)

    def _introduce(self, channel: Channel, host: str, admit: Admit) -> None:
        """Raises InvalidRequestError or WorkerUnavailableError for who cannot join; who may know why is told."""
        challenge = secrets.token_bytes(NONCE_BYTES)
        channel.send(Kind.CHALLENGE, PROTOCOL, challenge)
        frame = _said(channel)
        if frame.kind is not Kind.JOIN:
            raise InvalidRequestError(f"it said {frame.kind.name} where JOIN was due")
        request = JoinRequest.from_bytes(frame.payload)
        try:
            if not request.is_proven(self._token, challenge):
                raise ConfigError("the token of this rank is not the one of rank 0's group")
            claim = request.claim()
            check_claim(self._claim, claim)
            admit(claim.rank, channel, lambda hello: seal(self._token, challenge + request.nonce, hello))
        except SpecpipeError as error:
            channel.send(Kind.REFUSED, int(error.is_retryable), str(error).encode())
            raise
        logger.info("rank %d has joined, from %s", claim.rank, host)


def join(
    address: str, token: str, claim: Claim, *, patience_s: float = JOIN_PATIENCE_S, is_over: threading.Event
) -> tuple[Channel, bytes]:
    """Dial rank 0 at HOST:PORT until it is there. Returns the control socket and the hello.

    Raises ConfigError if this rank does not belong there, WorkerUnavailableError if rank 0 does not come in time, has
    no place for this rank now, or `is_over` was set.
    """
    give_up_at_s = time.monotonic() + patience_s
    is_first = True
    while True:
        reason = "it was asked to end"
        if not is_over.is_set():
            try:
                return _try_to_join(address, token, claim)
            except OSError as error:
                reason = error.strerror or str(error)
        if is_over.wait(DIAL_AGAIN_S) or time.monotonic() > give_up_at_s:
            raise WorkerUnavailableError(f"rank {claim.rank} could not reach rank 0 at {address} ({reason})")
        if is_first:
            logger.info("rank %d waits for rank 0 at %s (%s)", claim.rank, address, reason)
        is_first = False


def _try_to_join(address: str, token: str, claim: Claim) -> tuple[Channel, bytes]:
    """Raises OSError if nobody answers there yet."""
    end = socket.create_connection(split(address), timeout=DIAL_TIMEOUT_S)
    try:
        tune(end)
        channel = Channel(end, max_frame_bytes=MAX_JOIN_BYTES)
        hello = _say_who(channel, address, token, claim)
    except BaseException:
        end.close()
        raise
    channel.lift_limit()
    return channel, hello


def _say_who(channel: Channel, address: str, token: str, claim: Claim) -> bytes:
    frame = _heard(channel)
    if frame.kind is not Kind.CHALLENGE or len(frame.payload) != NONCE_BYTES:
        raise ConfigError(f"what answers at {address} is no rank 0: it said {frame.kind.name} first")
    if frame.number != PROTOCOL:
        raise ConfigError(
            f"rank {claim.rank} speaks version {PROTOCOL} of what ranks say to one another, rank 0 at {address} "
            f"version {frame.number}: install one version"
        )
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        channel.send(Kind.JOIN, 0, JoinRequest.create(claim, token, frame.payload, nonce).to_bytes())
    except WorkerUnavailableError as error:
        raise OSError(str(error)) from None
    answer = _heard(channel)
    if answer.kind is Kind.REFUSED:
        sentence = f"rank 0 at {address} refuses: {answer.payload.decode(errors='replace')}"
        raise WorkerUnavailableError(sentence) if answer.number else ConfigError(sentence)
    if answer.kind is not Kind.HELLO:
        raise ConfigError(f"what answers at {address} is no rank 0: it said {answer.kind.name}")
    return unseal(token, frame.payload + nonce, answer.payload)


def _heard(channel: Channel) -> Frame:
    """Raises OSError for a rank 0 that is gone or silent: it may be starting or ending."""
    try:
        frame = channel.receive(INTRODUCTION_TIMEOUT_S)
    except TimeoutError:
        raise OSError("what answers there says nothing") from None
    except WorkerUnavailableError as error:
        raise ConfigError(f"what answers there is no rank 0: {error}") from None
    if frame is None:
        raise OSError("what answers there has closed the connection")
    return frame


def _said(channel: Channel) -> Frame:
    """Raises InvalidRequestError for a stranger that says nothing."""
    try:
        frame = channel.receive(INTRODUCTION_TIMEOUT_S)
    except TimeoutError:
        raise InvalidRequestError(f"it said nothing for {INTRODUCTION_TIMEOUT_S:g} s") from None
    if frame is None:
        raise InvalidRequestError("it said nothing and left")
    return frame


def split(address: str) -> tuple[str, int]:
    """HOST:PORT; a host of IPv6 stands in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
