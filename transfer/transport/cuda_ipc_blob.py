"""The two blobs of a CUDA IPC handshake. Every field is checked before CUDA sees it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from transfer.errors import ConfigError
from transfer.transport.liveness import PipeAddress
from transfer.transport.peer import field_of, pack_blob, unpack_blob

NAME = "cuda_ipc"
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
TOKEN_BYTES = 16
_VERSION = 1
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A writer's blob; `token` names the offer."""

    line: PipeAddress
    token: bytes

    def to_blob(self) -> bytes:
        return pack_blob(NAME, _VERSION, "offer", {"line": self.line.to_wire(), "token": self.token})

    @classmethod
    def from_blob(cls, blob: bytes) -> Offered:
        """Read an offer.

        Raises:
            ConfigError: The blob is of another transport or version, or a field is wrong.
        """
        fields = unpack_blob(blob, transport=NAME, version=_VERSION, role="offer")
        return cls(line=PipeAddress.from_wire(fields.get("line")), token=_token(fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A target's blob. It offers bytes [offset, offset + num_bytes) of an allocation.

    Attributes:
        line: Of the target's process.
        token: The answered offer. Only the process that made it may map the memory, because the target watches that process.
        device: UUID of the device that the memory lies on.
        handle: The allocation's CUDA IPC handle.
    """

    line: PipeAddress
    token: bytes
    device: str
    handle: bytes
    offset: int
    num_bytes: int

    def to_blob(self) -> bytes:
        fields = {
            "line": self.line.to_wire(),
            "token": self.token,
            "device": self.device,
            "handle": self.handle,
            "offset": self.offset,
            "num_bytes": self.num_bytes,
        }
        return pack_blob(NAME, _VERSION, "answer", fields)

    @classmethod
    def from_blob(cls, blob: bytes, *, token: bytes) -> Answered:
        """Read the answer to the offer named `token`.

        Raises:
            ConfigError: The blob is of another transport or version, a field is wrong, or it answers another offer.
        """
        fields = unpack_blob(blob, transport=NAME, version=_VERSION, role="answer")
        answered = cls(
            line=PipeAddress.from_wire(fields.get("line")),
            token=_token(fields),
            device=field_of(fields, "device", str),
            handle=field_of(fields, "handle", bytes),
            offset=field_of(fields, "offset", int),
            num_bytes=field_of(fields, "num_bytes", int),
        )
        if answered.token != token:
            raise ConfigError("the peer's answer belongs to another offer; complete each offer with its own answer")
        if not _UUID.fullmatch(answered.device):
            raise ConfigError(f"field device of the peer's blob is {answered.device[:48]!r}; expected a UUID")
        if len(answered.handle) != HANDLE_BYTES:
            raise ConfigError(f"field handle of the peer's blob has {len(answered.handle)} bytes; expected {HANDLE_BYTES}")
        for name, value, least in (("offset", answered.offset, 0), ("num_bytes", answered.num_bytes, 1)):
            if not least <= value < 2**48:
                raise ConfigError(f"field {name} of the peer's blob is {value}; expected a number in [{least}, 2**48)")
        return answered


def _token(fields: dict[str, Any]) -> bytes:
    token = field_of(fields, "token", bytes)
    if len(token) != TOKEN_BYTES:
        raise ConfigError(f"field token of the peer's blob has {len(token)} bytes; expected {TOKEN_BYTES}")
    return token
