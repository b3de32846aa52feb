"""Check the structure of a NIXL agent's metadata before NIXL parses it.

NIXL passes a peer's connection address and memory keys to its backend, and UCX follows them unchecked. Damaged metadata ended the
process (seen: a segmentation fault for one in fifty). So this module walks the metadata first. It must have one connection, one
memory, which the answer names, and an address that `ucx_address` accepts. The walk is tested on metadata of an agent of this
process. A NIXL with another format is used only with a peer of the same version.

As with UCX, this detects broken metadata, but not hostile metadata: the values in the fields go to UCX as they are.

Source of the format: NIXL 1.5.1. Each field is a tag without its length, 8 bytes of length, the value and a bar.
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
    """The memory that a target offers, as NIXL addresses it."""

    address: int
    num_bytes: int
    device_index: int
    is_device: bool


class MalformedMetadata(Exception):
    """The walk found something that no metadata has."""


def _walk(metadata: bytes, tags: tuple[bytes, ...], begin: int) -> tuple[list[bytes], int]:
    """Return the values of the fields `tags` from byte `begin` on, and the byte after them."""
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
    """Walk a UCX memory key: a map of memory domains, the kind of memory, a key for each domain, the device's number.

    If that number is known, three bytes for each other device follow (number, latency, bandwidth), and an end.

    Source: UCX 1.23, src/ucp/core/ucp_rkey.c.
    """
    at = 9
    for _ in range(int.from_bytes(key[:8], "little").bit_count()):
        at += 1 + (key[at] if at < len(key) else 0)
    left = len(key) - at
    if left != 1 and (left % 3 != 2 or left < 0 or key[-1] != _NO_DEVICE):
        raise MalformedMetadata(f"its memory key of {len(key)} bytes does not end where it should")


def check_metadata(metadata: bytes, region: Region, *, own: bytes, peer_version: str, own_version: str, is_ucx: bool) -> None:
    """Raise ConfigError, with the versions of both ends, if `metadata` cannot be that of an agent that registered `region`.

    Args:
        metadata: The peer's.
        region: The memory that its answer offers.
        own: Metadata of an agent of this process.
        peer_version, own_version: NIXL versions.
        is_ucx: Whether the backend is UCX, whose addresses can be checked.
    """
    try:
        (_, conns, backend, address, _, _), _ = _connection(own)
    except MalformedMetadata:
        if peer_version != own_version:
            raise ConfigError(
                f"peer has NIXL {peer_version}, this end NIXL {own_version}, whose metadata has an unknown format: "
                "install the same NIXL on both ends"
            ) from None
        return
    try:
        found, at = _connection(metadata)
        if (found[1], found[2], found[4]) != (conns, backend, b"MemSection") or found[5] != (1).to_bytes(8, "little"):
            raise MalformedMetadata("it does not describe one connection and one memory")
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
