"""The walk over a NIXL agent's metadata, and over the UCX memory key in it."""

from __future__ import annotations

import random

from fuzz.target import Finding, Target, require
from fuzz.targets import ucx_address
from fuzz.trees import BYTE_SHARE, changed_bytes, changed_value
from transfer.errors import ConfigError
from transfer.transport.nixl_metadata import Region, check_metadata

REGION = Region(address=0x7F00_0000_0000, num_bytes=1 << 20, device_index=0, is_device=False)
_TAGS = (b"Agent", b"Conns", b"t", b"c", b"", b"nixlSecElms", b"bknd", b"nixlDList", b"t", b"n", b"")
_NUMBERS = 8


def _key(rng: random.Random | None = None) -> bytes:
    """A memory key of two memory domains, with the number of a device and two others."""
    lengths = (9, 4) if rng is None else (rng.choice((0, 4, 9, 255)), 4)
    domains = b"".join(bytes([length]) + bytes(min(length, 9)) for length in lengths)
    return (3).to_bytes(8, "little") + b"\x01" + domains + b"\x00" + b"\x01\x02\x03" * 2 + b"\xff"


def _values(key: bytes) -> list[bytes]:
    numbers = b"".join(value.to_bytes(_NUMBERS, "little") for value in (REGION.address, REGION.num_bytes, REGION.device_index))
    one, none = (1).to_bytes(8, "little"), (0).to_bytes(8, "little")
    address = ucx_address.TARGET.seeds()[0][1:]
    return [b"agent", one, b"UCX", address, b"MemSection", one, b"UCX", b"list", none, one, numbers + key]


def packed(values: list[bytes], lengths: dict[int, int] | None = None) -> bytes:
    """The fields as NIXL writes them, with the lengths that are given in the place of theirs."""
    fields = []
    for at, (tag, value) in enumerate(zip(_TAGS, values, strict=False)):
        length = (lengths or {}).get(at, len(value)) % 2**64
        fields.append(tag + length.to_bytes(8, "little") + value + b"|")
    return b"nixlSerDes|" + b"".join(fields)


def unpacked(data: bytes) -> list[bytes]:
    """The values of what `packed` wrote; raises ValueError for anything else."""
    at, values = len(b"nixlSerDes|"), []
    for tag in _TAGS:
        if not data.startswith(tag, at):
            raise ValueError("another field")
        at += len(tag) + 8
        length = int.from_bytes(data[at - 8 : at], "little")
        values.append(data[at : at + length])
        at += length + 1
    return values


# The address of `own` is what a peer's is compared with; its connection's fields what a peer's have to equal.
_OWN = packed(_values(_key()))


def _check(data: bytes) -> None:
    check_metadata(data, REGION, own=_OWN, peer_version="1.5.1", own_version="1.5.1", is_ucx=True)


def check(data: bytes) -> None:
    _check(data)
    values = unpacked(data)
    require(values[10].startswith(_values(b"")[10]), "metadata of another memory was let through")
    require(values[2] == values[6] == b"UCX", "metadata of another backend was let through")
    for other in (data[:-1], data + b"|"):
        try:
            _check(other)
        except ConfigError:
            continue
        raise Finding("metadata that was cut, or goes on behind its end, was let through")


def mutate(data: bytes, rng: random.Random) -> bytes:
    if rng.random() >= BYTE_SHARE:
        try:
            values = unpacked(data)
        except ValueError:
            values = _values(_key(rng))
        at = rng.randrange(len(values))
        choice = rng.randrange(6)
        if choice == 0:
            return packed(values, {at: changed_length(len(values[at]), rng)})
        if choice == 1:
            values[3] = ucx_address.mutate(b"\x02" + values[3], rng)[1:]
        elif choice == 2:
            values[10] = _values(b"")[10] + (_key(rng) if rng.random() < 0.5 else changed_bytes(values[10][24:], rng))
        elif choice == 3:
            values[at] = values[rng.randrange(len(values))]
        else:
            values[at] = changed_bytes(values[at], rng)
        return packed(values)
    return changed_bytes(data, rng)


def changed_length(length: int, rng: random.Random) -> int:
    changed = changed_value(length, rng)
    return changed if isinstance(changed, int) else 2**63


TARGET = Target(
    name="nixl_metadata",
    about="NIXL metadata and memory keys",
    modules=("transfer.transport.nixl_metadata", "transfer.transport.ucx_address"),
    check=check,
    refuses=(ConfigError,),
    mutate=mutate,
    seeds=lambda: [_OWN],
)
