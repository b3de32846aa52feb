"""What a peer says of its NIXL agent is looked at before NIXL, which trusts it, sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.transport.payload import ring_of
from transfer.errors import ConfigError
from transfer.transport.nixl import NixlTransport
from transfer.transport.nixl_metadata import MalformedMetadata, Region, check_memory_key, check_metadata
from transfer.transport.peer import pack_blob, unpack_blob

SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A target's real answer, and metadata of another agent of this process."""

    transport: NixlTransport
    fields: dict[str, object]
    metadata: bytes
    own: bytes
    region: Region

    def check(
        self, metadata: bytes, *, region: Region | None = None, own: bytes | None = None, peer_version: str = "1.5.1"
    ) -> None:
        check_metadata(
            metadata,
            self.region if region is None else region,
            own=self.own if own is None else own,
            peer_version=peer_version,
            own_version="1.5.1",
            is_ucx=True,
        )


@pytest.fixture(scope="module")
def answered() -> Iterator[Answered]:
    transport = NixlTransport(lane="net")
    memory = transport.register(ring_of(SIZE))
    answers = []
    for _ in range(2):
        _, answer = transport.accept(transport.offer().blob, memory)
        answers.append(unpack_blob(answer, transport="nixl", version=1, role="answer"))
    fields = answers[0]
    region = Region(address=fields["address"], num_bytes=SIZE, device_index=0, is_device=False)
    yield Answered(transport=transport, fields=fields, metadata=fields["metadata"], own=answers[1]["metadata"], region=region)
    transport.close()


def test_real_metadata_passes(answered: Answered) -> None:
    answered.check(answered.metadata)
    answered.check(answered.own)


def test_every_shorter_and_longer_one_is_refused(answered: Answered) -> None:
    for length in range(len(answered.metadata)):
        with pytest.raises(ConfigError, match="of the peer"):
            answered.check(answered.metadata[:length])
    with pytest.raises(ConfigError, match="1 bytes behind its end"):
        answered.check(answered.metadata + b"|")


def test_memory_that_the_answer_does_not_name_is_refused(answered: Answered) -> None:
    region = answered.region
    for wrong in (
        replace(region, address=region.address + 4096),
        replace(region, num_bytes=SIZE * 2),
        replace(region, device_index=1),
        replace(region, is_device=True),
    ):
        with pytest.raises(ConfigError, match=f"its memory is not the {wrong.num_bytes} bytes that the answer names"):
            answered.check(answered.metadata, region=wrong)


def test_a_format_that_is_not_known_needs_equal_versions(answered: Answered) -> None:
    answered.check(b"anything", own=b"another format", peer_version="1.5.1")
    with pytest.raises(ConfigError, match=r"peer has NIXL 1\.6\.0, this end NIXL 1\.5\.1.*install the same NIXL on both ends"):
        answered.check(b"anything", own=b"another format", peer_version="1.6.0")


def test_a_writer_refuses_it_before_nixl_sees_it(answered: Answered) -> None:
    """These ended the process."""
    at = answered.metadata.rindex(b"|t\x04") + 10  # the kind of memory
    kind = answered.metadata[:at] + b"\x20" + answered.metadata[at + 1 :]
    for metadata in (kind, answered.metadata[:-20], b""):
        offer = answered.transport.offer()
        with pytest.raises(ConfigError, match="NIXL metadata of"):
            offer.complete(pack_blob("nixl", 1, "answer", answered.fields | {"metadata": metadata}))
        offer.close()
    for name, value in (("address", 0), ("num_bytes", 2**64), ("device_index", -1)):
        offer = answered.transport.offer()
        try:
            with pytest.raises(ConfigError, match="which no memory has"):
                offer.complete(pack_blob("nixl", 1, "answer", answered.fields | {name: min(value, 2**64 - 1)}))
        finally:
            offer.close()


# Memory keys as UCX 1.23 packed them on a machine with two H200, but for the 192 bytes of the CUDA domain's own.
DEVICE_KEY = bytes.fromhex("300000000000000001" + "00" + "c0") + bytes(192)
ENDS = {
    "one GPU": "02" + "00000f" + "0125b3" + "ff",
    "two GPUs": "03" + "0025b3" + "01000f" + "0225b3" + "03000f" + "ff",
    "unknown": "ff",
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_keys_of_device_memory_pass_and_shorter_ones_do_not(end: str) -> None:
    key = DEVICE_KEY + bytes.fromhex(end)
    check_memory_key(key)
    for length in range(9, len(key)):
        if length == len(DEVICE_KEY) + 1:
            continue  # ends behind the device's number, as where no distances are known
        with pytest.raises(MalformedMetadata):
            check_memory_key(key[:length])
