"""The services of a hosted leader, with every field of every call as no honest peer has it; see tests/registry."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from decode_node.target_service import TargetLeader
from prefill_node.rank_messages import AttachDecode, DecodeAttached
from prefill_node.source_messages import SourceIdle
from prefill_node.source_service import SourceLeader
from tests.registry.hostile_messages import hostile_messages
from tests.registry.test_hostile_fields import (
    CALL_S,
    DECODE_LIFE,
    JOINED_LIFE,
    NEVER_RIGHT,
    NOWHERE,
    PREFILL_LIFE,
    REFUSED,
    RING_BYTES,
    RPCS,
    UNREAD,
    Nodes,
    Rpc,
    names,
    prefill,
    retell,
)
from tests.runtime.instances import hello, instance
from transfer.config import HostedConfig
from transfer.load_config import load_config
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.security import PlainText

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import PrefillControlAsyncStub

Code = grpc.StatusCode
UNREAD_HERE = UNREAD | {("PrefillControl.Prefill", "engine_request")}


class JoinedSource(SourceLeader):
    async def join(self) -> None:
        await self._joins.open(instance(JOINED_LIFE), NOWHERE, (NOWHERE,))


class HostedNodes(Nodes):
    """Both leaders of hosted instances, each behind a server of its own; of their ranks there is what attaches."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        config = load_config(HostedConfig, flags={"tls.insecure": 1, "limits.meet_timeout_s": 0.05})
        shared: dict[str, Any] = {"config": config, "security": PlainText(), "reports": lambda: ()}
        self.source = JoinedSource(hellos=(hello(0, incarnation=PREFILL_LIFE),), broadcast=self._to_source_rank, **shared)
        self.target = TargetLeader(hellos=(hello(0, incarnation=DECODE_LIFE),), broadcast=lambda message: None, **shared)

    def _to_source_rank(self, message: object) -> None:
        if isinstance(message, AttachDecode):
            answer = DecodeAttached(join=message.join, incarnation=message.instance.incarnation, links=(), ring_bytes=RING_BYTES)
            asyncio.get_running_loop().call_soon(self.source.on_rank_message, 0, answer)

    async def open(self) -> None:
        self.target.start(NOWHERE)
        await self.source.join()
        await self.serve(self.source, self.target)

    async def close(self) -> None:
        await self.close_servers()
        await self.source.close()
        await self.target.close()


def hosted_prefill(nodes: Nodes) -> pb.PrefillRequest:
    request = prefill(nodes)
    request.engine_request = "a"
    return request


HOSTED = {
    name: rpc
    for name, rpc in RPCS.items()
    if not name.startswith("Generate") and not rpc.method.startswith(("NodeControl", "TransferControl")) and name != "Prefill"
} | {"Prefill": Rpc(method="PrefillControl.Prefill", request=hosted_prefill, codes={Code.UNAVAILABLE})}


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[HostedNodes]:
    one = HostedNodes(tmp_path)
    await one.open()
    yield one
    await one.close()


def test_every_method_of_a_hosted_leader_is_here() -> None:
    served = {"PrefillControl", "DecodeControl"}
    services = [one for one in pb.DESCRIPTOR.services_by_name.values() if one.name in served]
    methods = {f"{one.name}.{method.name}" for one in services for method in one.methods}
    assert {rpc.method for rpc in HOSTED.values()} == methods - {"DecodeControl.Generate"}


@pytest.mark.parametrize("name", sorted(HOSTED, key=lambda name: "Drain" in name))
async def test_every_field_as_no_honest_peer_has_it(nodes: HostedNodes, name: str, caplog: pytest.LogCaptureFixture) -> None:
    rpc = HOSTED[name]
    caplog.set_level(logging.ERROR)
    request = rpc.request(nodes)
    wrong: list[str] = []
    for hostile in hostile_messages(request, retell):
        code, details = await nodes.call(rpc, hostile.payload)
        is_clear = len(details.splitlines()) <= 1 and len(details) <= 2000
        if code in REFUSED - {Code.RESOURCE_EXHAUSTED} and hostile.path and "cannot be read" not in details:
            is_clear = is_clear and any(word in details for word in names(hostile))
        if hostile.what in NEVER_RIGHT and (rpc.method, hostile.path) not in UNREAD_HERE:
            is_clear = is_clear and code in REFUSED
        if code not in REFUSED | {Code.OK} | rpc.codes or not is_clear:
            wrong.append(f"{hostile}: {code}: {details}")
    assert wrong == [], "\n".join(wrong)
    async with asyncio.timeout(CALL_S):
        while nodes.source.requests.num_transfers:
            await asyncio.sleep(0.01)
    assert nodes.source.requests.num_awaited == 0 and nodes.source.requests.num_prompts == 0
    assert nodes.target.requests.num_prompts == 0
    if "Drain" not in name:
        for method in ("PrefillControl.Status", "DecodeControl.Status"):
            assert (await nodes.call(Rpc(method=method, request=lambda _: pb.StatusRequest()), b""))[0] is Code.OK
    assert nodes.complaints == []
    assert [record.getMessage() for record in caplog.records if record.name.startswith("grpc")] == []


async def test_generating_is_the_engines_own_matter(nodes: HostedNodes) -> None:
    for name in ("Generate", "Generate of text"):
        for hostile in hostile_messages(RPCS[name].request(nodes)):
            code, details = await nodes.call(RPCS[name], hostile.payload)
            assert code in REFUSED | {Code.UNIMPLEMENTED}, f"{hostile}: {code}: {details}"


async def test_a_drain_of_a_prefill_side_waits_for_prompts_that_nobody_has_fetched_yet(nodes: HostedNodes) -> None:
    """Computed prompts hold the engine's pages for a decode side that will ask for them: they would be lost."""
    nodes.source.requests.offer("a", "a.1", (1, 2, 3))
    stub = cast("PrefillControlAsyncStub", pb_grpc.PrefillControlStub(nodes.channels["PrefillControl"]))
    assert (await stub.Drain(pb.DrainRequest(), timeout=2.0)).remaining == 1
    assert (await stub.Status(pb.StatusRequest(), timeout=CALL_S)).state == "draining"
    drained = asyncio.ensure_future(stub.Drain(pb.DrainRequest(), timeout=CALL_S))
    await asyncio.sleep(0.1)
    assert not drained.done()
    assert nodes.source.requests.decline("a.1", "its client has gone away")
    nodes.source.on_rank_message(0, SourceIdle(name="a"))
    assert (await drained).remaining == 0
