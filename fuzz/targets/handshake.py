"""The blobs of the data plane's handshake: the envelope of every transport, and what CUDA IPC and the liveness pipes read from
it."""

from __future__ import annotations

import random
import zlib
from typing import Any

import msgpack

from fuzz.target import Target, require
from fuzz.trees import BYTE_SHARE, changed_bytes, changed_tree
from transfer.errors import ConfigError
from transfer.transport.cuda_ipc_blob import HANDLE_BYTES, NAME, Answered
from transfer.transport.liveness import PipeAddress
from transfer.transport.mapped_blob import TOKEN_BYTES, MappedPlace, Offered
from transfer.transport.peer import ProcessIdentity, can_read_memory_of, field_of, pack_blob, unpack_blob
from transfer.transport.shm_blob import ShmAnswer

TOKEN = bytes(range(TOKEN_BYTES))
IDENTITY = ProcessIdentity(host="host", boot_id="boot", pid_namespace=4026531836, pid=77)
LINE = PipeAddress(identity=IDENTITY, start_time=12345, fd=9, inode=4242)
NOBODY = 2**22 + 1
"""A process id that no Linux gives: nothing is read from it."""


def check(data: bytes) -> None:
    errors: list[ConfigError] = []
    readers = (_ucx_offer, _ucx_answer, _offer, _answer, _shm_answer)
    for read in readers:
        try:
            read(data)
        except ConfigError as error:
            errors.append(error)
    if len(errors) == len(readers):
        raise errors[data[0] % len(readers) if data else 0]


def _offer(data: bytes) -> None:
    offered = Offered.from_blob(data, transport=NAME)
    _check_line(offered.line)
    require(len(offered.token) == TOKEN_BYTES, "a token of another length")
    require(Offered.from_blob(offered.to_blob(), transport=NAME) == offered, "an offer does not survive the wire")


def _answer(data: bytes) -> None:
    answered = Answered.from_blob(data, token=TOKEN)
    _check_place(answered.place)
    require(len(answered.handle) == HANDLE_BYTES, "a handle of another length")
    require(Answered.from_blob(answered.to_blob(), token=TOKEN) == answered, "an answer does not survive the wire")


def _shm_answer(data: bytes) -> None:
    answered = ShmAnswer.from_blob(data, token=TOKEN)
    _check_place(answered.place)
    require(0 <= answered.fd < 2**31 and 0 < answered.inode < 2**64, "a file out of range")
    require(ShmAnswer.from_blob(answered.to_blob(), token=TOKEN) == answered, "an answer does not survive the wire")


def _check_place(place: MappedPlace) -> None:
    _check_line(place.line)
    require(place.token == TOKEN, "an answer to another offer")
    require(0 <= place.offset < 2**48 and 0 < place.num_bytes < 2**48, "a region out of range")


def _check_line(line: PipeAddress) -> None:
    require(0 <= line.identity.pid <= 2**22 and 0 <= line.fd < 2**31, "a liveness pipe out of range")
    require(0 <= line.start_time < 2**63 and 0 <= line.inode < 2**64, "a liveness pipe out of range")


def _ucx_offer(data: bytes) -> None:
    """As `UcxTransport.accept` reads it, up to the address, which is a target of its own."""
    fields = unpack_blob(data, transport="ucx", version=1, role="offer")
    identity = ProcessIdentity.from_wire(fields.get("identity"))
    require((type(identity.host), type(identity.pid)) == (str, int), "an identity of other types")
    require(not can_read_memory_of(NOBODY, fields.get("proof")), "the memory of nobody can be read")
    for name, kind in (("address", bytes), ("ucx", str), ("shared_memory", bool), ("lane", str)):
        require(type(field_of(fields, name, kind)) is kind, f"{name} is of another type")


def _ucx_answer(data: bytes) -> None:
    fields = unpack_blob(data, transport="ucx", version=1, role="answer")
    for name, kind in (("address", bytes), ("ucx", str), ("lane", str), ("num_bytes", int)):
        require(type(field_of(fields, name, kind)) is kind, f"{name} is of another type")


def seeds() -> list[bytes]:
    offer = {
        "identity": IDENTITY.to_wire(),
        "address": b"\x01address",
        "ucx": "1.21.0",
        "proof": [4096, bytes(16)],
        "shared_memory": True,
        "lane": "auto",
    }
    answer = {"address": b"\x01address", "ucx": "1.21.0", "lane": "shm", "num_bytes": 1 << 20}
    device = "01234567-89ab-cdef-0123-456789abcdef"
    place = MappedPlace(line=LINE, token=TOKEN, offset=512, num_bytes=1 << 20)
    answered = Answered(place=place, device=device, handle=bytes(HANDLE_BYTES))
    return [
        pack_blob("ucx", 1, "offer", offer),
        pack_blob("ucx", 1, "answer", answer),
        Offered(transport=NAME, line=LINE, token=TOKEN).to_blob(),
        answered.to_blob(),
        ShmAnswer(place=place, fd=12, inode=4242).to_blob(),
    ]


def _parts(data: bytes) -> tuple[list[Any], dict[str, Any]]:
    transport, version, role, _, body = msgpack.unpackb(data)
    return [transport, version, role], msgpack.unpackb(body)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """The fields, with a checksum that is right; now and then the envelope, or the bytes."""
    choice = rng.random()
    try:
        if choice >= BYTE_SHARE + 0.15:
            head, fields = _parts(data)
            body = msgpack.packb(changed_tree(fields, rng))
            return bytes(msgpack.packb([*head, zlib.crc32(body), body]))
        if choice >= BYTE_SHARE:
            return bytes(msgpack.packb(changed_tree(msgpack.unpackb(data), rng)))
    except Exception:  # no blob any more, or a change that msgpack cannot say
        pass
    return changed_bytes(data, rng)


TARGET = Target(
    name="handshake",
    about="handshake blobs (msgpack)",
    modules=(
        "transfer.transport.peer",
        "transfer.transport.mapped_blob",
        "transfer.transport.cuda_ipc_blob",
        "transfer.transport.shm_blob",
        "transfer.transport.liveness",
    ),
    check=check,
    refuses=(ConfigError,),
    mutate=mutate,
    seeds=seeds,
    max_line_chars=700,
)
