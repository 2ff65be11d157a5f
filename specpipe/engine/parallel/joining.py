"""How a rank of another host shows that it belongs to a group, and how rank 0 shows that it is rank 0.

Owns: what a rank says of itself, which of it must agree, and the proofs that each end knows the group's token, which
itself never travels. Pure. Must not know: sockets, how long anything takes.

    rank 0 -> rank    CHALLENGE   a nonce
    rank -> rank 0    JOIN        a nonce of its own, a proof over both and over the claim, the claim (JSON)
    rank 0 -> rank    HELLO       a proof over both nonces and over the hello, the hello (JSON)   or REFUSED, a sentence

A proof is an HMAC-SHA256. It covers these three messages and nothing that follows.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import asdict, dataclass, fields

from specpipe.errors import ConfigError, InvalidRequestError

PROTOCOL = 1  # of everything that ranks say to one another
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_JOIN_BYTES = 4096  # of any frame before a rank has joined
_RANK, _RANK_0 = b"specpipe rank", b"specpipe rank 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a rank is. Rank 0 has one too, with which the others' are compared."""

    rank: int
    size: int  # ranks of the group
    model: str  # its name, for people
    fingerprint: str  # of its weights and config
    device: str  # cpu | cuda
    specpipe: str  # version
    torch: str  # version


@dataclass(frozen=True, slots=True)
class JoinRequest:
    nonce: bytes
    proof: bytes
    claim_bytes: bytes  # what the proof covers

    def to_bytes(self) -> bytes:
        return self.nonce + self.proof + self.claim_bytes

    @classmethod
    def create(cls, claim: Claim, token: str, challenge: bytes, nonce: bytes) -> JoinRequest:
        claim_bytes = json.dumps(asdict(claim)).encode()
        return cls(nonce, _proof(token, _RANK, challenge + nonce, claim_bytes), claim_bytes)

    @classmethod
    def from_bytes(cls, payload: bytes) -> JoinRequest:
        """Raises InvalidRequestError."""
        if len(payload) < NONCE_BYTES + PROOF_BYTES:
            raise InvalidRequestError(f"a request to join has {len(payload)} bytes: too few")
        middle, end = NONCE_BYTES, NONCE_BYTES + PROOF_BYTES
        return cls(payload[:middle], payload[middle:end], payload[end:])

    def is_proven(self, token: str, challenge: bytes) -> bool:
        expected = _proof(token, _RANK, challenge + self.nonce, self.claim_bytes)
        return hmac.compare_digest(self.proof, expected)

    def claim(self) -> Claim:
        """To be read only if it is proven. Raises InvalidRequestError."""
        try:
            content = json.loads(self.claim_bytes)
            claim = Claim(**content)
        except (ValueError, TypeError):
            raise InvalidRequestError("a request to join does not say what a rank must say") from None
        for field in fields(claim):
            if type(getattr(claim, field.name)) is not type(getattr(_EXAMPLE, field.name)):
                raise InvalidRequestError(f"a request to join has a {field.name} of a wrong kind")
        return claim


def check_claim(ours: Claim, theirs: Claim) -> None:
    """Raises ConfigError, which names what both have, if that rank cannot be of rank 0's group."""
    who = f"rank {theirs.rank}"
    if theirs.specpipe != ours.specpipe:
        raise ConfigError(f"{who} is of specpipe {theirs.specpipe}, rank 0 of {ours.specpipe}: install one version")
    if theirs.size != ours.size:
        raise ConfigError(f"{who} is one of {theirs.size} ranks, rank 0 one of {ours.size}: tensor_parallel_size")
    if not 0 < theirs.rank < ours.size:
        raise ConfigError(f"{who} cannot join: the ranks besides rank 0 are 1 to {ours.size - 1}")
    if theirs.fingerprint != ours.fingerprint:
        raise ConfigError(
            f"{who} has the model {theirs.model} ({theirs.fingerprint[:12]}), "
            f"rank 0 has {ours.model} ({ours.fingerprint[:12]}): they must be the same files"
        )
    if theirs.device != ours.device:
        raise ConfigError(f"{who} runs on {theirs.device}, rank 0 on {ours.device}: --device must be the same")
    if theirs.torch != ours.torch:
        raise ConfigError(f"{who} has torch {theirs.torch}, rank 0 {ours.torch}: install one version")


def seal(token: str, nonces: bytes, hello: bytes) -> bytes:
    """The payload of HELLO to a rank of another host. `nonces`: the challenge, then the rank's."""
    return _proof(token, _RANK_0, nonces, hello) + hello


def unseal(token: str, nonces: bytes, payload: bytes) -> bytes:
    """The hello. Raises ConfigError if whoever has sent it does not know the token."""
    given, hello = payload[:PROOF_BYTES], payload[PROOF_BYTES:]
    if not hmac.compare_digest(given, _proof(token, _RANK_0, nonces, hello)):
        raise ConfigError("whoever answers there does not know the token of this group")
    return hello


def _proof(token: str, role: bytes, nonces: bytes, content: bytes) -> bytes:
    return hmac.new(token.encode(), role + b"\0" + nonces + content, "sha256").digest()


_EXAMPLE = Claim(rank=1, size=2, model="", fingerprint="", device="", specpipe="", torch="")
