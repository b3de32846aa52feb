"""The target's blob of a CUDA IPC handshake. Every field is checked before CUDA sees it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from transfer.errors import ConfigError
from transfer.transport.mapped_blob import MappedPlace, number_of
from transfer.transport.peer import field_of

NAME = "cuda_ipc"
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A target's blob.

    Attributes:
        place: The memory in its allocation.
        device: UUID of the device that the memory lies on.
        handle: The allocation's CUDA IPC handle.
        signals: Descriptor and inode of the signals' memory in the target's process; None without signals.
    """

    place: MappedPlace
    device: str
    handle: bytes
    signals: tuple[int, int] | None = None

    def to_blob(self) -> bytes:
        fields: dict[str, Any] = {"device": self.device, "handle": self.handle}
        if self.signals is not None:
            fields["signals_fd"], fields["signals_inode"] = self.signals
        return self.place.to_blob(NAME, **fields)

    @classmethod
    def from_blob(cls, blob: bytes, *, token: bytes) -> Answered:
        """Read the answer to the offer named `token`.

        Raises:
            ConfigError: The blob is of another transport or version, a field is wrong, or it answers another offer.
        """
        place, fields = MappedPlace.from_blob(blob, transport=NAME, token=token)
        signals = None
        if "signals_fd" in fields:
            fd, inode = (
                number_of(fields, "signals_fd", least=0, end=2**31),
                number_of(fields, "signals_inode", least=1, end=2**64),
            )
            signals = fd, inode
        answered = cls(
            place=place,
            device=field_of(fields, "device", str),
            handle=field_of(fields, "handle", bytes),
            signals=signals,
        )
        if not _UUID.fullmatch(answered.device):
            raise ConfigError(f"field device of the peer's blob is {answered.device[:48]!r}; expected a UUID")
        if len(answered.handle) != HANDLE_BYTES:
            raise ConfigError(f"field handle of the peer's blob has {len(answered.handle)} bytes; expected {HANDLE_BYTES}")
        return answered
