"""Check the structure of a UCX worker address before UCX parses it.

UCX follows every length in an address without knowing where its bytes end, and an unknown version aborts the process. So this
module walks a peer's address first, entry by entry. The walk must end where the bytes end. It is tested on an address of this
process. If that address does not pass (another format of UCX, or UCX_UNIFIED_MODE), only the header is compared.

This detects a broken, truncated or random address. It cannot make a hostile address safe: the values in the entries go to UCX.

Source of the format: the head of UCX 1.21's src/ucp/wireup/address.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from transfer.errors import ConfigError

MAX_ADDRESS_BYTES: Final = 16 * 1024  # an eight-NIC host's is about 2 KiB

_VERSION_MASK: Final = 0x0F
_V1, _V2 = 0, 1
_FLAG_NAME, _FLAG_UUID, _FLAG_CLIENT_ID = 0x1, 0x2, 0x4
_ID_BYTES: Final = 8
_LAST: Final = 0x80
_EMPTY_DEVICE, _MD_MASK = 0x80, 0x7F
_NUM_PATHS, _SYS_DEVICE, _DEVICE_LENGTH_MASK = 0x40, 0x20, 0x1F
_HAS_ENDPOINT, _INTERFACE_LENGTH_MASK = 0x40, 0x3F
_CHECKSUM_BYTES: Final = 2
_ATTRIBUTE_BYTES: Final = {_V1: 16, _V2: 8}
_MAX_INTERFACES: Final = 128  # UCP_MAX_RESOURCES; each further device has one, or is the pseudo device at the end
_NO_DEVICES: Final = 0xFF


class _Malformed(Exception):
    """The walk found something that no address has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first byte or two: the format's version and its flags."""

    version: int
    flags: int

    @classmethod
    def of(cls, address: bytes) -> Header:
        """Read the header of an address.

        Raises:
            ConfigError: The address is too short.
        """
        if len(address) < 2:
            raise ConfigError(f"UCX address of {len(address)} bytes is too short for its header")
        version = address[0] & _VERSION_MASK
        return cls(version=version, flags=address[0] >> 4 if version == _V1 else address[1])

    @property
    def num_bytes(self) -> int:
        return 1 if self.version == _V1 else 2


class _Walk:
    """A place in an address; every step stays inside."""

    def __init__(self, address: bytes) -> None:
        self._address = address
        self._place = 0

    @property
    def num_left(self) -> int:
        return len(self._address) - self._place

    def skip(self, num_bytes: int) -> bytes:
        if num_bytes > self.num_left:
            raise _Malformed(f"byte {self._place} needs {num_bytes} more, {self.num_left} are there")
        self._place += num_bytes
        return self._address[self._place - num_bytes : self._place]

    def byte(self) -> int:
        return self.skip(1)[0]

    def extended(self, mask: int, version: int) -> tuple[int, int]:
        """Return a byte and the number in its masked bits. If all are set, version 2 has the number in the next byte."""
        first = self.byte()
        number = first & mask
        return first, self.byte() if version != _V1 and number == mask else number


class AddressCheck:
    """Rejects bytes that cannot be the address of a worker of a UCX like this one.

    Args:
        own: Address of a worker of this process.
    """

    def __init__(self, own: bytes) -> None:
        self._header = Header.of(own)
        self._walk = next((walk for walk in _WALKS if _passes(walk, own)), None)
        self._interface_bytes = {} if self._walk is None else dict(self._walk(own))

    def check(self, address: bytes, *, peer: str, own: str) -> None:
        """Check a peer's address.

        Args:
            peer, own: UCX versions of both ends. Equal versions are compared more closely.

        Raises:
            ConfigError: It is no such address; the message names the problem.
        """
        if len(address) > MAX_ADDRESS_BYTES:
            raise ConfigError(f"UCX address of the peer (UCX {peer}) has {len(address)} bytes; at most {MAX_ADDRESS_BYTES}")
        found = Header.of(address)
        if found != self._header:
            raise ConfigError(
                f"UCX address of the peer (UCX {peer}) has format version {found.version} with flags {found.flags:#x}; this "
                f"end (UCX {own}) has version {self._header.version} with flags {self._header.flags:#x}: "
                "set UCX_ADDRESS_VERSION and UCX_ADDRESS_DEBUG_INFO alike"
            )
        if self._walk is None:
            return
        try:
            interfaces = self._walk(address)
        except _Malformed as error:
            raise ConfigError(f"UCX address of {len(address)} bytes of the peer (UCX {peer}) is malformed: {error}") from None
        if not any(checksum in self._interface_bytes for checksum, _ in interfaces):
            raise ConfigError(
                f"UCX address of the peer (UCX {peer}) has no transport that this end (UCX {own}) has: set UCX_TLS alike; or it "
                "is none"
            )
        for checksum, num_bytes in interfaces:
            expected = self._interface_bytes.get(checksum, num_bytes)
            if peer == own and num_bytes != expected:
                raise ConfigError(
                    f"UCX address of the peer (UCX {peer}) is malformed: transport {checksum.hex()} with an address of "
                    f"{num_bytes} bytes; it has {expected}"
                )


def _walk_address(address: bytes, index_bytes: int) -> list[tuple[bytes, int]]:
    """Return name checksum and address length of each transport. In some versions `index_bytes` bytes follow the attributes."""
    header, walk = Header.of(address), _Walk(address)
    if header.version not in _ATTRIBUTE_BYTES or not header.flags & _FLAG_UUID:
        raise _Malformed(f"format version {header.version} with flags {header.flags:#x}")
    walk.skip(header.num_bytes + _ID_BYTES + (_ID_BYTES if header.flags & _FLAG_CLIENT_ID else 0))
    if header.flags & _FLAG_NAME:
        walk.skip(walk.byte())
    found: list[tuple[bytes, int]] = []
    is_last, num_devices = False, 0
    while not is_last:
        num_devices += 1
        device, _ = walk.extended(_MD_MASK, header.version)
        if device == _NO_DEVICES and not found:
            break
        flags, device_bytes = walk.extended(_DEVICE_LENGTH_MASK, header.version)
        is_last = bool(flags & _LAST)
        walk.skip(bool(flags & _NUM_PATHS) + bool(flags & _SYS_DEVICE) + device_bytes)
        is_last_interface = bool(device & _EMPTY_DEVICE)
        while not is_last_interface:
            checksum = walk.skip(_CHECKSUM_BYTES)
            walk.skip(_ATTRIBUTE_BYTES[header.version] + index_bytes)
            flags, num_bytes = walk.extended(_INTERFACE_LENGTH_MASK, header.version)
            if flags & _HAS_ENDPOINT:
                raise _Malformed("a worker's address with an endpoint's in it")
            walk.skip(num_bytes)
            found.append((checksum, num_bytes))
            is_last_interface = bool(flags & _LAST)
        if max(len(found), num_devices) > _MAX_INTERFACES:
            raise _Malformed(f"more than {_MAX_INTERFACES} transports or devices")
    if walk.num_left or not found:
        raise _Malformed(f"{walk.num_left} bytes behind its end, {len(found)} transports")
    return found


_WALKS: Final[tuple[Callable[[bytes], list[tuple[bytes, int]]], ...]] = (
    lambda address: _walk_address(address, 0),
    lambda address: _walk_address(address, 1),
)


def _passes(walk: Callable[[bytes], list[tuple[bytes, int]]], address: bytes) -> bool:
    try:
        walk(address)
    except _Malformed:
        return False
    return True
