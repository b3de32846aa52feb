"""Whether bytes have the structure of a NIXL agent's metadata, looked at before NIXL parses them.

NIXL gives a peer's connection address and memory keys to its backend as they are, and UCX follows them unchecked: damaged
metadata ended the process (seen: a segmentation fault for one in fifty). So it is walked here first: one connection, one memory,
the memory that the answer names, and an address that `ucx_address` lets through. The walk's assumptions are tested on metadata
that an agent of this process made; a NIXL with another format is used only with a peer of the same version.

As with UCX this catches what is broken, not what is hostile: what is in the fields goes to UCX as it is.

Source of the format: what NIXL 1.5.1 writes; each field is a tag without its length, 8 bytes of length, the value and a bar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from transfer.errors import ConfigError
from transfer.transport.ucx_address import AddressCheck

_BEGIN: Final = b"nixlSerDes|"
_END: Final = b"|"
_CONNECTION: Final = (b"Agent", b"Conns", b"t", b"c", b"", b"nixlSecElms")
_MEMORY: Final = (b"bknd", b"nixlDList", b"t", b"n", b"")
_MAX_VALUE_BYTES: Final = 32 * 1024
_NO_DEVICE: Final = 0xFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The memory that metadata must be of."""

    address: int
    num_bytes: int
    device_index: int
    is_device: bool


class MalformedMetadata(Exception):
    """The walk met something that no metadata has."""


def _walk(metadata: bytes, tags: tuple[bytes, ...], begin: int) -> tuple[list[bytes], int]:
    """Values of the fields `tags` from byte `begin` on, and the byte behind them."""
    values = []
    at = begin
    for tag in tags:
        if not metadata.startswith(tag, at):
            raise MalformedMetadata(f"byte {at} is not field {tag.decode() or 'without a name'}")
        at += len(tag) + 8
        num_bytes = int.from_bytes(metadata[at - 8 : at], "little")
        if num_bytes > _MAX_VALUE_BYTES or not metadata.startswith(_END, at + num_bytes):
            raise MalformedMetadata(f"field {tag.decode() or 'without a name'} of {num_bytes} bytes does not end where it should")
        values.append(metadata[at : at + num_bytes])
        at += num_bytes + 1
    return values, at


def _connection(metadata: bytes) -> tuple[list[bytes], int]:
    if not metadata.startswith(_BEGIN):
        raise MalformedMetadata("it begins otherwise")
    return _walk(metadata, _CONNECTION, len(_BEGIN))


def check_memory_key(key: bytes) -> None:
    """Walk a UCX memory key: a map of memory domains, the kind of memory, a key for each domain, the device's number. Where that
    is known, three bytes for each other device follow (its number, latency, bandwidth), and an end.

    Source: what UCX 1.23 packs; see its src/ucp/core/ucp_rkey.c.
    """
    at = 9
    for _ in range(int.from_bytes(key[:8], "little").bit_count()):
        at += 1 + (key[at] if at < len(key) else 0)
    left = len(key) - at
    if left != 1 and (left % 3 != 2 or left < 0 or key[-1] != _NO_DEVICE):
        raise MalformedMetadata(f"its memory key of {len(key)} bytes does not end where it should")


def check_metadata(metadata: bytes, region: Region, *, own: bytes, peer_version: str, own_version: str, is_ucx: bool) -> None:
    """Refuse what cannot be the metadata of an agent like ours with `region` registered.

    Args:
        metadata: The peer's.
        region: What its answer says that it offers.
        own: Metadata of an agent of this process.
        peer_version, own_version: NIXL versions of both ends.
        is_ucx: Whether the backend is UCX, whose addresses can be looked into.

    Raises:
        ConfigError: What is wrong, with the versions of both ends.
    """
    try:
        (_, conns, backend, address, _, _), _ = _connection(own)
    except MalformedMetadata:
        if peer_version != own_version:
            raise ConfigError(
                f"peer has NIXL {peer_version}, this end NIXL {own_version}, whose metadata has a format that is not known here: "
                "install the same NIXL on both ends"
            ) from None
        return
    try:
        found, at = _connection(metadata)
        if (found[1], found[2], found[4]) != (conns, backend, b"MemSection") or found[5] != (1).to_bytes(8, "little"):
            raise MalformedMetadata("it is not of one connection and one memory")
        memory, at = _walk(metadata, _MEMORY, at)
        numbers = (region.address, region.num_bytes, region.device_index)
        described = b"".join(number.to_bytes(8, "little") for number in numbers)
        kind, count = (int.from_bytes(number, "little") for number in memory[2:4])
        if (memory[0], kind, count) != (backend, int(region.is_device), 1) or not memory[4].startswith(described):
            raise MalformedMetadata(f"its memory is not the {region.num_bytes} bytes that the answer names")
        if at != len(metadata):
            raise MalformedMetadata(f"{len(metadata) - at} bytes behind its end")
        if is_ucx:
            check_memory_key(memory[4][len(described) :])
    except MalformedMetadata as error:
        raise ConfigError(
            f"NIXL metadata of {len(metadata)} bytes of the peer (NIXL {peer_version}; {own_version} here) is malformed: {error}"
        ) from None
    if is_ucx:
        AddressCheck(address).check(found[3], peer=f"of NIXL {peer_version}", own=f"of NIXL {own_version}")
