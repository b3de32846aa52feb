"""A node changes its role: three nodes, of which one is a decode node, then a prefill node, then a decode node again.

Its processes are the same all the time, two ranks among them that hold their halves of the model and their group. Its peers see
lives that end and begin.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from kvferry.local_cluster.cluster import ClusterNode
from tests.cluster.calls import Answer, Caller, Reference, prompt, status_of, until, until_idle
from tests.cluster.conftest import POOL_TOKENS
from tests.cluster.open_nodes import Nodes, open_nodes
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import NodeControlAsyncStub

pytestmark = pytest.mark.timeout(240)

SWITCH_S = 30.0
PROMPT_TOKENS = 300


@dataclass(slots=True, kw_only=True)
class Tiers:
    """A prefill node, a decode node, and the one that changes; each knows all of them as prefill nodes."""

    nodes: Nodes
    prefill: ClusterNode
    decode: ClusterNode
    changing: ClusterNode
    addresses: dict[str, str] = field(default_factory=dict)

    async def is_joined(self, of: ClusterNode, address: str) -> bool:
        status = await status_of(of)
        return status is not None and any(peer.address == address and peer.state == "joined" for peer in status.peers)


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Tiers]:
    folder = tmp_path_factory.mktemp("tiers")
    with open_nodes(folder) as nodes:
        ports = dict(zip(("prefill", "decode", "changing"), nodes.hold_ports(3), strict=True))
        addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        shared = {"model": model, "pool.num_tokens": POOL_TOKENS, "restart.backoff_s": 0.1}
        other = folder / "as-prefill.yaml"
        other.write_text("pool: {page_size: 8}\nchunk: {chunk_tokens: 128}\n")
        two_roles = {"parallel.tp_size": 2, "other_role": other, "offload.host_ratio": 1, "pool.page_size": 32}
        prefill = nodes.launch("prefill", shared | {"server.port": ports["prefill"]})
        decode = nodes.launch("decode", shared | {"server.port": ports["decode"]}, *addresses.values())
        changing = nodes.launch("decode", shared | two_roles | {"server.port": ports["changing"]}, *addresses.values())
        yield Tiers(nodes=nodes, prefill=prefill, decode=decode, changing=changing, addresses=addresses)


@asynccontextmanager
async def node_control(node: ClusterNode) -> AsyncIterator[NodeControlAsyncStub]:
    async with grpc.aio.insecure_channel(node.address) as channel:
        yield cast("NodeControlAsyncStub", pb_grpc.NodeControlStub(channel))


async def switch(node: ClusterNode, role: str, timeout_s: float = SWITCH_S) -> pb.SwitchRoleResponse:
    async with node_control(node) as stub:
        answer: pb.SwitchRoleResponse = await stub.SwitchRole(pb.SwitchRoleRequest(role=role), timeout=timeout_s)
        return answer


async def health(node: ClusterNode) -> dict[str, str]:
    async with grpc.aio.insecure_channel(node.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        names = ("", *(f"kvferry.v1.{one}Control" for one in ("Prefill", "Decode", "Node")))
        answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10) for name in names]
        state = health_pb2.HealthCheckResponse.ServingStatus.Name
        return {name: state(answer.status) for name, answer in zip(names, answers, strict=True)}


def processes(node: ClusterNode) -> tuple[int, ...]:
    return (node.pid, *node.rank_pids)


async def roles_in_metrics(node: ClusterNode) -> set[str]:
    _, page = await node.http("/metrics")
    return set(re.findall(r'role="(\w+)"', page))


async def held_by_ranks(node: ClusterNode) -> dict[int, tuple[int, int, int]]:
    """Threads, open files and memory of each rank."""
    status = await status_of(node)
    assert status is not None
    return {rank.rank: (rank.threads, rank.open_files, rank.resident_bytes) for rank in status.ranks}


async def ask_all(node: ClusterNode, reference: Reference, num_requests: int, first: int) -> list[Answer]:
    prompts = [prompt(PROMPT_TOKENS, first + index) for index in range(num_requests)]
    async with Caller(node.address) as caller:
        answers = list(await asyncio.gather(*(caller.ask(token_ids, 8) for token_ids in prompts)))
    for token_ids, answer in zip(prompts, answers, strict=True):
        reference.check(token_ids, answer)
    return answers


async def test_a_node_goes_to_the_other_tier_and_back(tiers: Tiers, reference: Reference) -> None:
    prefill, decode, changing, at = tiers.prefill, tiers.decode, tiers.changing, tiers.addresses
    await tiers.nodes.until_started(prefill, decode, changing)
    await until(lambda: tiers.is_joined(decode, at["prefill"]), "the decode node has joined")
    await until(lambda: tiers.is_joined(changing, at["prefill"]), "the changing node has joined")
    before, lives = processes(changing), [changing.incarnation]
    status = await status_of(changing)
    assert status is not None and at["changing"] not in [peer.address for peer in status.peers], "not its own prefill node"
    await ask_all(changing, reference, 2, 0)
    await until_idle(changing)
    await asyncio.sleep(1.0)  # connections of the start have ended by then
    had = await held_by_ranks(changing)
    assert (await health(changing))["kvferry.v1.PrefillControl"] == "NOT_SERVING"

    # Requests of others go on while it changes.
    async with Caller(decode.address) as caller:
        meanwhile = [caller.begin(prompt(PROMPT_TOKENS, 50 + index), 8)[1] for index in range(4)]
        answer = await switch(changing, "prefill")
        for index, task in enumerate(meanwhile):
            reference.check(prompt(PROMPT_TOKENS, 50 + index), await task)
    assert (answer.role, answer.role_before) == ("prefill", "decode")
    assert answer.incarnation == changing.incarnation not in lives
    lives.append(changing.incarnation)
    assert processes(changing) == before, "no process was started again"
    assert await roles_in_metrics(changing) == {"prefill"}
    assert await health(changing) == {
        "": "SERVING",
        "kvferry.v1.PrefillControl": "SERVING",
        "kvferry.v1.DecodeControl": "NOT_SERVING",
        "kvferry.v1.NodeControl": "SERVING",
    }
    status = await status_of(changing)
    assert status is not None and (status.role, status.state, status.ready) == ("prefill", "ready", True)
    assert status.instance.shard.page_size == 8 and not status.draining and len(status.ranks) == 2

    # Everything goes through it.
    await until(lambda: tiers.is_joined(decode, at["changing"]), "the decode node has joined the changed one")
    async with node_control(prefill) as stub:
        assert not (await stub.Drain(pb.DrainRequest(), timeout=20)).remaining
        served = [answer.done.prefill_node for answer in await ask_all(decode, reference, 3, 100) if answer.done is not None]
        assert served == [at["changing"]] * 3
        await stub.Undrain(pb.UndrainRequest(), timeout=20)
    async with Caller(changing.address) as caller:
        refused = await caller.ask(prompt(9), 1)
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    assert refused.details == "this node is a prefill node now, and serves no DecodeControl"
    assert (await switch(changing, "prefill")).role_before == "prefill", "it is one already"

    # And back. What a role takes it gives back: the ranks have what they had in their first life as a decode node.
    await until(lambda: tiers.is_joined(decode, at["prefill"]), "the decode node uses the first one again")
    assert (await switch(changing, "decode")).role_before == "prefill"
    assert changing.incarnation not in lives and processes(changing) == before and changing.exit_code is None
    await until(lambda: tiers.is_joined(changing, at["prefill"]), "the changing node has joined again")
    assert await roles_in_metrics(changing) == {"decode"}
    await ask_all(changing, reference, 2, 200)
    await ask_all(decode, reference, 1, 300)
    await until_idle(prefill, decode, changing)
    first_had = dict(had)

    async def has_the_same() -> bool:
        had.update(await held_by_ranks(changing))
        return all(now[:2] == then[:2] for now, then in zip(had.values(), first_had.values(), strict=True))

    await until(has_the_same, f"threads and open files as before: {first_had}, now {had}")
    assert all(now[2] < 1.1 * then[2] for now, then in zip(had.values(), first_had.values(), strict=True)), (first_had, had)


async def test_a_drained_node_drains_in_its_other_role_too_and_ends_well_in_it(tiers: Tiers) -> None:
    changing = tiers.changing
    async with node_control(changing) as stub:
        assert not (await stub.Drain(pb.DrainRequest(), timeout=20)).remaining
    switched = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "kvferry", "node", "switch-role", "prefill", "--target", changing.address, "--insecure"],
        env=tiers.nodes.environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert switched.returncode == 0, switched.stderr
    life = f"{changing.incarnation:#018x}"
    assert switched.stdout == (
        f"{changing.address} is a prefill node (before: decode), incarnation {life}\n"
        f"it was told to drain, and takes no requests: kvferry node undrain --target {changing.address}\n"
    )
    status = await status_of(changing)
    assert status is not None and (status.role, status.state, status.ready) == ("prefill", "draining", False)
    assert set((await health(changing)).values()) == {"NOT_SERVING"}
    async with node_control(changing) as stub:
        assert (await stub.Undrain(pb.UndrainRequest(), timeout=20)).was_draining
    await until(lambda: tiers.is_joined(tiers.decode, changing.address), "the decode node has joined it")
    changing.terminate()
    await until(lambda: changing.exit_code is not None, "it has ended")
    assert changing.exit_code == 0
