"""Where the ranks of a group meet for what they compute together; rank 0 tells the others when all have loaded.

Owns: that message. Must not know: sockets, torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from specpipe.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Ranks that share memory need nothing of it but how many they are."""

    hosts: tuple[str, ...]  # addresses at which ranks reach one another, by rank
    port: int = 0  # of the store that rank 0 has opened on its host; 0: there is none

    def num_on_host_of(self, rank: int) -> int:
        """Ranks that share that one's memory and cores, itself included."""
        return self.hosts.count(self.hosts[rank])

    def to_bytes(self) -> bytes:
        return json.dumps({"hosts": self.hosts, "port": self.port}).encode()

    @classmethod
    def from_bytes(cls, payload: bytes, size: int) -> Meeting:
        """Of a group of `size` ranks. Raises InvariantError."""
        try:
            content = json.loads(payload)
            hosts, port = content["hosts"], content["port"]
            is_sound = len(hosts) == size and all(isinstance(host, str) for host in hosts) and type(port) is int
        except (ValueError, TypeError, KeyError):
            is_sound = False
        if not is_sound:
            raise InvariantError(f"rank 0 told no meeting of {size} ranks: {payload[:80]!r}")
        return cls(hosts=tuple(hosts), port=port)
