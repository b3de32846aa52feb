"""The walk over a UCX worker's address: what stands between a peer's bytes and a library that trusts them."""

from __future__ import annotations

import random

from fuzz.target import Finding, Target, require
from fuzz.trees import changed_bytes
from transfer.errors import ConfigError
from transfer.transport.ucx_address import MAX_ADDRESS_BYTES, AddressCheck

_UUID = b"ABCDEFGH"
_NUM_INTERFACES = 3


def address(version: int, rng: random.Random) -> bytes:
    """An address as UCX packs it: a header, devices, each with its transports; lengths are right, or now and then are not."""

    def length(num_bytes: int) -> int:
        return num_bytes if rng.random() < 0.95 else rng.choice((0, 1, num_bytes + 1, 31, 63))

    made = bytearray([0x20 if version == 0 else 0x01]) if version == 0 else bytearray([0x01, 0x02])
    made += _UUID
    num_devices = rng.choice((1, 1, 2, 3))
    for device in range(num_devices):
        num_interfaces = rng.choice((1, 1, 2, _NUM_INTERFACES))
        made.append(rng.randrange(8))
        device_bytes = rng.choice((0, 6, 18))
        flags = 0x80 if device == num_devices - 1 else 0
        made.append(flags | length(device_bytes) & 0x1F)
        made += rng.randbytes(device_bytes)
        for interface in range(num_interfaces):
            made += CHECKSUMS[rng.randrange(len(CHECKSUMS))]
            made += bytes(16 if version == 0 else 8)
            num_bytes = rng.choice((4, 8, 12))
            made.append((0x80 if interface == num_interfaces - 1 else 0) | length(num_bytes) & 0x3F)
            made += rng.randbytes(num_bytes)
    return bytes(made)


CHECKSUMS = (b"\x01\x02", b"\x03\x04", b"\x05\x06")


def _honest(version: int) -> bytes:
    """One whose lengths are all right: the walk's own yardstick."""
    for seed in range(1000):
        made = address(version, random.Random(seed))
        if len(AddressCheck(made)._interface_bytes) == len(CHECKSUMS):
            return made
    raise AssertionError("no address passes the walk")


_OWN = {version: _honest(version) for version in (0, 1)}
_CHECKS = {version: AddressCheck(own) for version, own in _OWN.items()}


def check(data: bytes) -> None:
    version = data[0] % 2 if data else 0
    same = bool(data and data[0] & 2)
    given = data[1:]
    checks = _CHECKS[version]
    checks.check(given, peer="1.21.0", own="1.21.0" if same else "1.20.0")
    require(len(given) <= MAX_ADDRESS_BYTES, "an address without a bound was let through")
    # Let through: then no byte more or less is an address, for the walk has to end where its bytes end.
    for other in (given[:-1], given + b"\x00"):
        try:
            checks.check(other, peer="1.21.0", own="1.21.0")
        except ConfigError:
            continue
        raise Finding("an address that was cut, or goes on behind its end, was let through")


def mutate(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        version = rng.randrange(2)
        return bytes([version | rng.randrange(2) << 1]) + address(version, rng)
    return data[:1] + changed_bytes(data[1:], rng)


TARGET = Target(
    name="ucx_address",
    about="UCX worker addresses",
    modules=("transfer.transport.ucx_address",),
    check=check,
    refuses=(ConfigError,),
    mutate=mutate,
    seeds=lambda: [bytes([version | 2]) + own for version, own in _OWN.items()],
)
