"""The control socket between rank 0 and another rank: small numbered frames, whole or not at all.

Owns: framing, and what a broken, silent or senseless peer looks like. Must not know: what the frames are for, whether
the peer is on this host.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from dataclasses import dataclass
from enum import IntEnum

from specpipe.errors import WorkerUnavailableError

_HEADER = struct.Struct("<BQI")  # kind, number, bytes that follow
MAX_FRAME_BYTES = 1 << 28
SEND_TIMEOUT_S = 8.0  # of a whole frame, out or in
MAX_UNREACHABLE_S = 8.0
_READ_BYTES = 1 << 20


class Kind(IntEnum):
    """What a frame says; sent by rank 0 unless it says otherwise."""

    HELLO = 1  # JSON: what to load, and as which rank
    LOADED = 2  # from a rank: its weights are in memory
    MEET = 3  # JSON: where all ranks meet now (see meeting.py)
    READY = 4  # from a rank: it takes steps
    STEP = 5  # number: of the step
    CLEAR = 6  # slots to zero
    PING = 7
    PONG = 8  # from a rank; number: of the last step it finished
    FAILED = 9  # from a rank: one sentence; it ends
    END = 10  # the group ends in order
    CHALLENGE = 11  # to whoever has dialled; number: of the protocol, payload: a nonce (see joining.py)
    JOIN = 12  # from a rank: what it is, and that it knows the token
    REFUSED = 13  # one sentence; number: 1 if another try may succeed


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    number: int = 0
    payload: bytes = b""


class Channel:
    """One end. `send` may be called from several threads, `receive` from one."""

    def __init__(self, end: socket.socket, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """`max_frame_bytes`: of what is received."""
        self._max_frame_bytes = max_frame_bytes
        self._socket = end
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._sending = threading.Lock()

    @property
    def own_host(self) -> str:
        """The address of this end, of a connection over a network."""
        return str(self._socket.getsockname()[0])

    @property
    def peer_host(self) -> str:
        """The peer's; empty if it is gone, or no network lies between."""
        if self._socket.family == socket.AF_UNIX:
            return ""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return ""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, number: int = 0, payload: bytes = b"") -> None:
        """Raises WorkerUnavailableError if the peer is gone, or has read nothing for SEND_TIMEOUT_S."""
        frame = _HEADER.pack(kind, number, len(payload)) + payload
        with self._sending:
            try:
                self._socket.settimeout(SEND_TIMEOUT_S)
                self._socket.sendall(frame)
            except OSError as error:
                raise WorkerUnavailableError(f"the control socket failed ({error})") from error

    def ping(self, kind: Kind, number: int = 0) -> None:
        """Send an empty frame if that can be done without waiting. A peer that is gone is left to `receive`."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            if select.select((), (self._socket,), (), 0)[1]:
                self._socket.sendall(_HEADER.pack(kind, number, 0))
        except (OSError, ValueError):
            return
        finally:
            self._sending.release()

    def receive(self, timeout_s: float | None) -> Frame | None:
        """The next frame; None when either end is closed, or the peer is out of reach.

        Raises TimeoutError if none begins in time, WorkerUnavailableError for what is no frame.
        """
        try:
            is_readable = bool(select.select((self._socket,), (), (), timeout_s)[0])
        except (OSError, ValueError):  # closed here, by another thread
            return None
        if not is_readable:
            raise TimeoutError(f"no frame within {timeout_s} s")
        deadline_s = time.monotonic() + SEND_TIMEOUT_S
        header = self._read(_HEADER.size, deadline_s)
        if header is None:
            return None
        kind, number, length = _HEADER.unpack(header)
        if kind not in _KINDS:
            raise WorkerUnavailableError(f"what came on the control socket is no frame of ours (kind {kind})")
        if length > self._max_frame_bytes:
            raise WorkerUnavailableError(f"a frame of {length} bytes came; at most {self._max_frame_bytes} are taken")
        payload = self._read(length, deadline_s) if length else b""
        return None if payload is None else Frame(Kind(kind), number, payload)

    def lift_limit(self) -> None:
        """The peer has shown that it belongs: from now on frames of MAX_FRAME_BYTES are taken."""
        self._max_frame_bytes = MAX_FRAME_BYTES

    def shut(self) -> None:
        """No more is sent or received, which the peer sees too. `close` is still due."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was never connected, or is gone

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int, deadline_s: float) -> bytes | None:
        """Raises WorkerUnavailableError if it takes too long: a frame that has begun comes soon or never."""
        parts = bytearray()
        while len(parts) < count:
            try:
                if not select.select((self._socket,), (), (), max(0.0, deadline_s - time.monotonic()))[0]:
                    raise WorkerUnavailableError(f"a frame did not come whole within {SEND_TIMEOUT_S:g} s")
                part = self._socket.recv(min(count - len(parts), _READ_BYTES))
            except (OSError, ValueError):
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


def tune(end: socket.socket) -> None:
    """Make a TCP connection fit for a control socket: frames go at once, and a host that is out of reach is noticed
    within MAX_UNREACHABLE_S, whatever the processes at the ends are doing."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(MAX_UNREACHABLE_S * 1e3))
