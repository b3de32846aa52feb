"""What a peer gives out as its UCX address is looked at before UCX, which would abort the process, sees it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from transfer.errors import ConfigError
from transfer.transport.peer import pack_blob, unpack_blob
from transfer.transport.ucx import UcxTransport
from transfer.transport.ucx_address import MAX_ADDRESS_BYTES, AddressCheck

VERSION = "1.21.0"


@pytest.fixture(scope="module")
def address() -> bytes:
    transport = UcxTransport()
    own = transport.create_worker("offer").address.tobytes()
    transport.close()
    return bytes(own)


def refuse(address: bytes, own: bytes, *, peer: str = VERSION) -> str:
    with pytest.raises(ConfigError) as caught:
        AddressCheck(own).check(address, peer=peer, own=VERSION)
    return str(caught.value)


def test_addresses_of_every_lane_pass(address: bytes) -> None:
    transport = UcxTransport()
    for purpose in ("offer", "shm", "net"):
        AddressCheck(address).check(transport.create_worker(purpose).address.tobytes(), peer=VERSION, own=VERSION)
    transport.close()


@pytest.mark.parametrize(("name", "value"), [("UCX_ADDRESS_VERSION", "v2"), ("UCX_ADDRESS_DEBUG_INFO", "y")])
def test_the_walk_knows_ucxs_other_formats(monkeypatch: pytest.MonkeyPatch, address: bytes, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    transport = UcxTransport()
    own, other = (bytes(transport.create_worker("offer").address.tobytes()) for _ in range(2))
    transport.close()
    assert len(own) != len(address) or own[0] != address[0], "another format"
    AddressCheck(own).check(other, peer=VERSION, own=VERSION)
    refuse(other[:-1], own)


def test_every_cut_and_every_addition_is_refused(address: bytes) -> None:
    for length in range(len(address)):
        refuse(address[:length], address)
    assert "1 bytes behind its end" in refuse(address + b"\0", address)
    assert str(MAX_ADDRESS_BYTES) in refuse(address + bytes(MAX_ADDRESS_BYTES), address)


def test_another_format_is_refused_with_both_ucx_versions(address: bytes) -> None:
    text = refuse(bytes([address[0] ^ 0x0F]) + address[1:], address, peer="1.12.0")
    assert "1.12.0" in text and VERSION in text and "format version 15" in text


def test_lengths_of_known_transports_hold_between_equal_versions_only(address: bytes) -> None:
    """A longer address of one transport, rightly linked: only what the same library made for itself can tell."""
    first = 1 + 8 + 2 + 2 + 16  # header, id, device without an address, checksum, attributes
    assert address[first] & 0x3F == 8
    longer = address[:first] + bytes([address[first] + 1]) + address[first + 1 : first + 9] + b"\0" + address[first + 9 :]
    assert "it has 8" in refuse(longer, address)
    AddressCheck(address).check(longer, peer="1.30.0", own=VERSION)


def test_a_format_that_the_walk_does_not_know_is_left_to_ucx(address: bytes) -> None:
    """Only its header is compared: a newer UCX must go on working."""
    foreign = address[:9] + b"\1\2\3"
    AddressCheck(foreign).check(address, peer=VERSION, own=VERSION)
    refuse(b"\x0f" + address[1:], foreign)


def test_broken_addresses_in_blobs_are_refused_and_the_process_lives() -> None:
    """With the right checksum, from the peer's offer and from its answer."""
    writer, target, generator = UcxTransport(), UcxTransport(), random.Random(3)
    memory = target.register(bytearray(4096))

    def broken(blob: bytes, role: str, change: Callable[[bytes], bytes]) -> bytes:
        fields = unpack_blob(blob, transport="ucx", version=1, role=role)
        return pack_blob("ucx", 1, role, fields | {"address": change(fields["address"])})

    changes: list[Callable[[bytes], bytes]] = [
        lambda address: generator.randbytes(len(address)),
        lambda address: address[: len(address) // 2],
        lambda address: bytes([address[0] | 15]) + address[1:],
        lambda address: b"",
    ]
    for change in changes:
        offer = writer.offer()
        with pytest.raises(ConfigError):
            target.accept(broken(offer.blob, "offer", change), memory)
        session, answer = target.accept(offer.blob, memory)
        with pytest.raises(ConfigError):
            offer.complete(broken(answer, "answer", change))
        session.close()
        offer.close()
    writer.close()
    target.close()
