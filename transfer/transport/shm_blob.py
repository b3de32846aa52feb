"""The target's blob of a handshake over shared memory. Every field is checked before a file is opened."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.transport.mapped_blob import MappedPlace, number_of

NAME = "shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmAnswer:
    """A target's blob.

    Attributes:
        place: The memory in its file.
        fd: Descriptor of the file in the target's process.
        inode: The file itself, in case the descriptor was closed and used again.
    """

    place: MappedPlace
    fd: int
    inode: int

    def to_blob(self) -> bytes:
        return self.place.to_blob(NAME, fd=self.fd, inode=self.inode)

    @classmethod
    def from_blob(cls, blob: bytes, *, token: bytes) -> ShmAnswer:
        """Read the answer to the offer named `token`.

        Raises:
            ConfigError: The blob is of another transport or version, a field is wrong, or it answers another offer.
        """
        place, fields = MappedPlace.from_blob(blob, transport=NAME, token=token)
        return cls(
            place=place,
            fd=number_of(fields, "fd", least=0, end=2**31),
            inode=number_of(fields, "inode", least=1, end=2**64),
        )
