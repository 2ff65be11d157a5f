"""The other ranks as processes of other hosts, each started there by its own command: they dial rank 0.

Owns: rank 0's rendezvous, and what a process says of itself as a rank. Must not know: what ranks do, when one is lost.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import specpipe
from specpipe.config import EngineConfig, RendezvousConfig
from specpipe.engine.folder import check_folder
from specpipe.engine.parallel.channel import Channel
from specpipe.engine.parallel.group import RankGroup
from specpipe.engine.parallel.joining import Claim
from specpipe.engine.parallel.rank import RankHello
from specpipe.engine.parallel.rendezvous import Rendezvous, Seal

if TYPE_CHECKING:
    from specpipe.engine.parallel.shared_memory import SharedMemory


class DistantRanks:
    """See `OtherRanks`."""

    has_one_host = False

    def __init__(self, engine: EngineConfig, size: int, config: RendezvousConfig) -> None:
        """Raises as check_folder."""
        self._engine = engine
        self._size = size
        self.rendezvous = Rendezvous(config.address, config.token, claim_of(engine, 0, size))

    def bring(self, group: RankGroup) -> None:
        """Raises ConfigError if it cannot listen."""

        def admit(rank: int, channel: Channel, seal: Seal) -> None:
            group.add(rank, channel, RankHello.create(rank, self._size, self._engine), seal=seal)

        self.rendezvous.open(admit)

    def open_shared(self) -> SharedMemory | None:
        return None

    def hosts(self, channels: Sequence[Channel]) -> tuple[str, ...]:
        """As each end's connection is seen from the other: so ranks can reach one another."""
        return (channels[0].own_host, *(channel.peer_host for channel in channels))

    def close(self) -> None:
        self.rendezvous.close()


def claim_of(engine: EngineConfig, rank: int, size: int) -> Claim:
    """Raises as check_folder."""
    folder = check_folder(engine.model)
    return Claim(
        rank=rank,
        size=size,
        model=folder.name,
        fingerprint=folder.fingerprint(""),  # rank 0 decides on the dtype
        device=engine.device.partition(":")[0],
        specpipe=specpipe.__version__,
        torch=importlib.metadata.version("torch").partition("+")[0],
    )
