"""The last release and this one, side by side in both tiers: in any pairing, the tokens are those of one process.

`releases/` has the wheel of the last tagged release, as its tag built it (CONTRIBUTING.md, "Releases"). Its nodes run from there,
with the libraries of this environment.
"""

from __future__ import annotations

import ast
import asyncio
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

import transfer
from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.node import ClusterNode
from kvferry.local_cluster.spec import Role
from tests.cluster.calls import Caller, Reference, prompt, until, until_idle
from tests.cluster.conftest import HEARTBEAT_S, POOL_TOKENS
from tests.cluster.open_nodes import Nodes, open_nodes
from transfer.errors import RemoteProtocolError
from transfer.pb import kvferry_pb2 as pb

pytestmark = pytest.mark.timeout(240)

RELEASES = Path(__file__).parent / "releases"
RELEASED = Path(__file__).parents[3] / "proto" / "released"
PROMPTS = [prompt(length, variant) for variant, length in enumerate((10, 150, 300, 500))]
TRIES = 12


def release_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """A node of each release in each tier."""

    old_prefill: ClusterNode
    new_prefill: ClusterNode
    old_decode: ClusterNode
    new_decode: ClusterNode
    release: str

    @property
    def all(self) -> tuple[ClusterNode, ...]:
        return (self.old_prefill, self.new_prefill, self.old_decode, self.new_decode)


@pytest.fixture(scope="module")
def tiers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiers]:
    (wheel,) = RELEASES.glob("*.whl")  # the last one, and no other
    source = tmp_path_factory.mktemp("release")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(source)
    # The working directory is left out of the path, or the old release's nodes would be those of this tree.
    old = {"PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}
    with open_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        ports = nodes.hold_ports(2)
        addresses = [f"127.0.0.1:{port}" for port in ports]

        def launch(role: Role, environment: dict[str, str], *peers: str, port: int = 0) -> ClusterNode:
            return start(nodes, role, model, environment, *peers, port=port)

        tiers = Tiers(
            old_prefill=launch("prefill", old, port=ports[0]),
            new_prefill=launch("prefill", {}, port=ports[1]),
            old_decode=launch("decode", old, *addresses),
            new_decode=launch("decode", {}, *addresses),
            release=release_of(wheel),
        )
        asyncio.run(nodes.until_started(*tiers.all))
        asyncio.run(until(lambda: are_joined(tiers), "every decode node has joined both prefill nodes"))
        yield tiers


def start(nodes: Nodes, role: Role, model: Path, environment: dict[str, str], *peers: str, port: int) -> ClusterNode:
    settings = {"model": model, "pool.num_tokens": POOL_TOKENS, "heartbeat.interval_s": HEARTBEAT_S, "server.port": port}
    return nodes.launch(role, settings, *peers, environment=environment)


async def are_joined(tiers: Tiers) -> bool:
    statuses = [await node.status() for node in (tiers.old_decode, tiers.new_decode)]
    return all(peer.state == "joined" for status in statuses for peer in status.peers)


def test_what_the_contract_is_guarded_by_is_what_the_release_speaks() -> None:
    """`make check` compares proto/ with proto/released/, which must not change."""
    (wheel,), (image,) = RELEASES.glob("*.whl"), RELEASED.glob("*.binpb")
    assert image.stem == f"v{release_of(wheel)}"
    with zipfile.ZipFile(wheel) as archive:
        stub = archive.read("transfer/pb/kvferry_pb2.py").decode()
    found = re.search(r"AddSerializedFile\((b'.*')\)", stub)
    assert found is not None
    spoken = descriptor_pb2.FileDescriptorProto.FromString(ast.literal_eval(found[1]))
    (guarded,) = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    assert fields_of(guarded) == fields_of(spoken)
    assert fields_of(guarded).keys() <= set(pb.DESCRIPTOR.message_types_by_name)


def fields_of(file: descriptor_pb2.FileDescriptorProto) -> dict[str, dict[str, int]]:
    return {message.name: {field.name: field.number for field in message.field} for message in file.message_type}


async def test_the_nodes_are_of_the_releases_that_they_should_be(tiers: Tiers) -> None:
    versions = [(await node.status()).instance.version for node in tiers.all]
    assert versions == [tiers.release, transfer.__version__, tiers.release, transfer.__version__]
    assert tiers.release != transfer.__version__


@pytest.mark.parametrize("decode", ["old_decode", "new_decode"])
async def test_requests_go_through_nodes_of_both_releases(tiers: Tiers, reference: Reference, decode: str) -> None:
    node: ClusterNode = getattr(tiers, decode)
    seen: set[str] = set()
    async with Caller(node.address) as caller:
        for _ in range(TRIES):
            answers = await asyncio.gather(*(caller.ask(ids) for ids in PROMPTS))
            for ids, answer in zip(PROMPTS, answers, strict=True):
                reference.check(ids, answer)
                assert answer.done is not None and answer.done.stats.bytes > 0
                seen.add(answer.done.prefill_node)
            if len(seen) == 2:
                break
    assert seen == {tiers.old_prefill.address, tiers.new_prefill.address}
    await until_idle(*tiers.all)


async def test_a_drain_of_this_release_is_undone_for_peers_of_the_one_before(tiers: Tiers, reference: Reference) -> None:
    """The older decode node does not know the event, and joins again."""
    address = tiers.new_prefill.address

    async def has_heard(state: str) -> bool:
        statuses = [await node.status() for node in (tiers.old_decode, tiers.new_decode)]
        return {peer.state for status in statuses for peer in status.peers if peer.address == address} == {state}

    async with NodeClient(address) as client:
        assert await client.drain(budget_s=5) == 0
        await until(lambda: has_heard("draining"), "both decode nodes know of the drain")
        assert await client.undrain()
    await until(lambda: has_heard("joined"), "both decode nodes use it again")
    async with Caller(tiers.old_decode.address) as caller:
        answers = await asyncio.gather(*(caller.ask(ids) for ids in PROMPTS))
    for ids, answer in zip(PROMPTS, answers, strict=True):
        reference.check(ids, answer)
    assert address in {answer.done.prefill_node for answer in answers if answer.done is not None}
    await until_idle(*tiers.all)


async def test_tools_of_this_release_operate_nodes_of_the_one_before(tiers: Tiers) -> None:
    async with NodeClient(tiers.old_decode.address) as client:
        assert not await client.abort("nobody")
        with pytest.raises(RemoteProtocolError, match=r"has no ListRequests: it is a node of version 0\.1"):
            await client.list_requests()
