"""The control socket between rank 0 and another rank: small numbered frames, whole or not at all.

Owns: framing and what a broken or silent peer looks like. Must not know: what the frames are for.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum

from specpipe.errors import WorkerUnavailableError

_HEADER = struct.Struct("<BQI")  # kind, number, bytes that follow
MAX_FRAME_BYTES = 1 << 28
SEND_TIMEOUT_S = 8.0


class Kind(IntEnum):
    """What a frame says; sent by rank 0 unless it says otherwise."""

    HELLO = 1  # JSON: what to load, and as which rank
    LOADED = 2  # from a rank: its weights are in memory
    MEET = 3  # all ranks meet now; number: the port of their store, if they need one
    READY = 4  # from a rank: it takes steps
    STEP = 5  # number: of the step
    CLEAR = 6  # slots to zero
    PING = 7
    PONG = 8  # from a rank; number: of the last step it finished
    FAILED = 9  # from a rank: one sentence; it ends


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    number: int = 0
    payload: bytes = b""


class Channel:
    """One end. `send` may be called from several threads, `receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: Kind, number: int = 0, payload: bytes = b"") -> None:
        """Raises WorkerUnavailableError if the peer is gone, or has read nothing for SEND_TIMEOUT_S."""
        frame = _HEADER.pack(kind, number, len(payload)) + payload
        with self._sending:
            try:
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
        """The next frame; None when either end is closed. Raises TimeoutError if none comes in time."""
        try:
            is_readable = bool(select.select((self._socket,), (), (), timeout_s)[0])
        except (OSError, ValueError):  # closed here, by another thread
            return None
        if not is_readable:
            raise TimeoutError(f"no frame within {timeout_s} s")
        header = self._read(_HEADER.size)
        if header is None:
            return None
        kind, number, length = _HEADER.unpack(header)
        if length > MAX_FRAME_BYTES:
            return None
        payload = self._read(length) if length else b""
        return None if payload is None else Frame(Kind(kind), number, payload)

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._socket.recv(count - len(parts))
            except TimeoutError:
                raise
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)
