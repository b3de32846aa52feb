"""The handshake blobs of transports whose writer maps the target's memory: the parts that do not depend on the kind of memory.

Every field is checked before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transfer.errors import ConfigError
from transfer.transport.liveness import PipeAddress
from transfer.transport.peer import field_of, pack_blob, unpack_blob
from transfer.transport.signals import LAYOUT

TOKEN_BYTES = 16
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A writer's blob; `token` names the offer.

    Attributes:
        has_signals: Whether the writer can use `transfer.transport.signals`, of this build's `LAYOUT`.
    """

    transport: str
    line: PipeAddress
    token: bytes
    has_signals: bool = False

    def to_blob(self) -> bytes:
        fields = {"line": self.line.to_wire(), "token": self.token, "signals": LAYOUT if self.has_signals else 0}
        return pack_blob(self.transport, _VERSION, "offer", fields)

    @classmethod
    def from_blob(cls, blob: bytes, *, transport: str) -> Offered:
        """Read an offer.

        Raises:
            ConfigError: The blob is of another transport or version, or a field is wrong.
        """
        fields = unpack_blob(blob, transport=transport, version=_VERSION, role="offer")
        return cls(
            transport=transport,
            line=PipeAddress.from_wire(fields.get("line")),
            token=_token(fields),
            has_signals=fields.get("signals") == LAYOUT,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedPlace:
    """A target's memory: bytes [offset, offset + num_bytes) of an allocation.

    Attributes:
        line: Of the target's process.
        token: The answered offer. Only the process that made it may map the memory, because the target watches that process.
    """

    line: PipeAddress
    token: bytes
    offset: int
    num_bytes: int

    def to_blob(self, transport: str, **fields: Any) -> bytes:
        """Write the answer to an offer. `fields` name the allocation."""
        own = {"line": self.line.to_wire(), "token": self.token, "offset": self.offset, "num_bytes": self.num_bytes}
        return pack_blob(transport, _VERSION, "answer", {**own, **fields})

    @classmethod
    def from_blob(cls, blob: bytes, *, transport: str, token: bytes) -> tuple[MappedPlace, dict[str, Any]]:
        """Read the answer to the offer named `token`. Return also all of its fields.

        Raises:
            ConfigError: The blob is of another transport or version, a field is wrong, or it answers another offer.
        """
        fields = unpack_blob(blob, transport=transport, version=_VERSION, role="answer")
        place = cls(
            line=PipeAddress.from_wire(fields.get("line")),
            token=_token(fields),
            offset=number_of(fields, "offset", least=0),
            num_bytes=number_of(fields, "num_bytes", least=1),
        )
        if place.token != token:
            raise ConfigError("the peer's answer belongs to another offer; complete each offer with its own answer")
        return place, fields


def number_of(fields: dict[str, Any], name: str, *, least: int, end: int = 2**48) -> int:
    """Return a number in [least, end). Raise ConfigError for anything else."""
    value = field_of(fields, name, int)
    if not least <= value < end:
        raise ConfigError(
            f"field {name} of the peer's blob is {value}; expected a number in [{least}, 2**{end.bit_length() - 1})"
        )
    return value


def _token(fields: dict[str, Any]) -> bytes:
    token = field_of(fields, "token", bytes)
    if len(token) != TOKEN_BYTES:
        raise ConfigError(f"field token of the peer's blob has {len(token)} bytes; expected {TOKEN_BYTES}")
    return token
