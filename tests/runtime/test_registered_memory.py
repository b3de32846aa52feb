"""Memory that transports register and peers can reach: ring, probe scratch and staging memory, never the KV pool."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import two_tiers
from tests.runtime.instances import until
from tests.runtime.scattered_tiers import ScatteredTiers
from transfer.layout import DType, KVLayout, Shard
from transfer.pool.staging import StagingBuffer
from transfer.transport import nixl_library
from transfer.transport.inproc import InprocTransport
from transfer.transport.nixl import NixlTransport
from transfer.transport.ucx import UcxTransport

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=8, dtype=DType.FLOAT16)

Made = Callable[..., Any]
TRANSPORTS: dict[str, tuple[bool, Made]] = {
    "inproc-one-sided": (True, InprocTransport),
    "inproc-two-sided": (False, InprocTransport),
    "ucx-shm": (False, lambda hub, one_sided: UcxTransport(lane="shm")),
    "ucx-net": (False, lambda hub, one_sided: UcxTransport(lane="net")),
    "nixl-shm": (True, lambda hub, one_sided: NixlTransport(lane="shm")),
    "nixl-net": (True, lambda hub, one_sided: NixlTransport(lane="net")),
}


class Recorder:
    """Every range of addresses that a transport, or NIXL itself, is given."""

    def __init__(self) -> None:
        self.given: list[range] = []
        self.in_nixl: list[tuple[int, int]] = []
        self.exported: list[range] = []

    def wrap(self, transport: Any) -> Any:
        """Return `transport`; from now on, the memory that it is given is recorded."""
        register, accept = transport.register, transport.accept
        by_memory: dict[int, range] = {}

        def recorded(buffer: Any) -> Any:
            memory = register(buffer)
            by_memory[id(memory)] = range(buffer.data_ptr(), buffer.data_ptr() + buffer.numel())
            self.given.append(by_memory[id(memory)])
            return memory

        def accepted(blob: bytes, memory: Any) -> Any:
            self.exported.append(by_memory[id(memory)])
            return accept(blob, memory)

        transport.register, transport.accept = recorded, accepted
        return transport


def overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_no_transport_is_ever_given_a_byte_of_a_pool(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real transports under the whole machinery: prompts go through, and all that was registered lies outside of every pool."""
    is_one_sided, make = TRANSPORTS[kind]
    recorder = Recorder()
    registered_with_nixl = nixl_library.Agent.register

    def register_with_nixl(agent: Any, memory: Any, address: int) -> None:
        recorder.in_nixl.append((address, memory.num_bytes))
        registered_with_nixl(agent, memory, address)

    monkeypatch.setattr(nixl_library.Agent, "register", register_with_nixl)
    monkeypatch.setattr(two_tiers, "InprocTransport", lambda hub, one_sided: recorder.wrap(make(hub, one_sided=one_sided)))
    monkeypatch.setattr(two_tiers, "StagingBuffer", partial(StagingBuffer, is_shared=is_one_sided))
    tiers = ScatteredTiers(LAYOUT, Shard(tp_size=2, page_size=16), Shard(page_size=32), is_one_sided=is_one_sided)
    try:
        for name in ("a", "b"):
            tiers.start(name, 70)
        await asyncio.gather(*(tiers.compute(name, 70) for name in ("a", "b")))
        for name in ("a", "b"):
            await until(lambda name=name: all(name in receiver.complete for receiver in tiers.receivers))  # type: ignore[misc]
            tiers.assert_arrived(name, 70)
        ranks = (*tiers.senders, *tiers.receivers)
        pools = [
            range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            for rank in ranks
            for part in rank.pages.pool.parts
            for storage in part.storages()
        ]
        assert len(recorder.given) == len(ranks), "each rank registers one memory: its staging slots or its ring"
        assert pools and not [(given, pool) for given in recorder.given for pool in pools if overlap(given, pool)]
        rings = recorder.given[len(tiers.senders) :]
        assert len(recorder.exported) == 2 and set(recorder.exported) <= set(rings), "a session was offered something else"
        assert bool(recorder.in_nixl) == kind.startswith("nixl")
        sizes = {len(given) for given in recorder.given}
        for address, num_bytes in recorder.in_nixl:
            own = range(address, address + num_bytes)
            assert num_bytes in sizes and not any(overlap(own, pool) for pool in pools)
    finally:
        tiers.close()


REGISTERED = {
    ("transfer/receive/loop.py", "ring_memory.tensor"),
    ("transfer/receive/attach.py", "memory.scratch.tensor"),
    ("transfer/send/attach.py", "scratch.tensor"),
    ("transfer/send/loop.py", "staging.tensor"),
}
EXPORTED = {("transfer/receive/attach.py", "self._receiver.memory"), ("transfer/local_pair.py", "self.loop.memory")}


def test_nodes_register_and_export_in_these_places_alone() -> None:
    """A new place needs a security review, and an entry in SECURITY.md."""
    registered, exported = set(), set()
    for package in ("transfer", "decode_node", "prefill_node", "node_runtime", "embedded_engine"):
        for file in (ROOT / package).rglob("*.py"):
            if (ROOT / "transfer/transport") in file.parents:
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                if "transport" not in ast.unparse(node.func.value):
                    continue
                if node.func.attr == "register":
                    registered.add((file.relative_to(ROOT).as_posix(), ast.unparse(node.args[0])))
                elif node.func.attr == "accept":
                    exported.add((file.relative_to(ROOT).as_posix(), ast.unparse(node.args[1])))
    assert registered == REGISTERED
    assert exported == EXPORTED
