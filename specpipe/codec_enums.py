"""The enums of `specpipe.types` against those of the wire.

Owns: one table an enum, by name: PREFIX_NAME. Must not know: messages.
"""

from __future__ import annotations

import enum
from typing import Any, Generic, TypeVar

from specpipe.errors import ErrorCode, InvalidRequestError
from specpipe.rpc.v1 import common_pb2
from specpipe.types import FinishReason, Mode, Origin, Rule

_E = TypeVar("_E", bound=enum.Enum)


class _EnumTable(Generic[_E]):
    """One enum of types against one of the wire, by name: PREFIX_NAME."""

    def __init__(self, kind: type[_E], wire: Any, prefix: str) -> None:
        self._name = prefix.lower()
        self._to_pb: dict[_E, int] = {member: wire.Value(f"{prefix}_{member.name}") for member in kind}
        self._from_pb = {value: member for member, value in self._to_pb.items()}

    def to_pb(self, member: _E) -> Any:
        return self._to_pb[member]

    def from_pb(self, value: int) -> _E:
        try:
            return self._from_pb[value]
        except KeyError:
            raise InvalidRequestError(f"{self._name} has no value {value}") from None


MODES = _EnumTable(Mode, common_pb2.Mode, "MODE")
RULES = _EnumTable(Rule, common_pb2.Rule, "RULE")
FINISH_REASONS = _EnumTable(FinishReason, common_pb2.FinishReason, "FINISH_REASON")
ORIGINS = _EnumTable(Origin, common_pb2.Origin, "ORIGIN")
ERROR_CODES = _EnumTable(ErrorCode, common_pb2.ErrorCode, "ERROR_CODE")
