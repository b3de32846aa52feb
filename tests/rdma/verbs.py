"""Over RDMA verbs: which way UCX takes, and KV of prefill ranks' pools into a decode rank's. Run by `make test-rdma`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.two_tiers import Pages, ReceivingRank, SendingRank, TwoTiers
from tests.rdma.witness import DEVICE, Count
from tests.transport.ends import SEED, Ends
from tests.transport.payload import noise
from transfer.chunk import ChunkPlan
from transfer.layout import DType, KVLayout, Shard, TokenOrder, routes
from transfer.transport.nixl import NixlTransport

NUM_TOKENS = 1000
DEADLINE_S = 200.0


def test_writes_of_another_process_go_over_rc_verbs(tmp_path: Path) -> None:
    """UCX itself says what it chose. Without `lane`, as a node opens the transport: nothing else is allowed here."""
    log = tmp_path / "ucx.log"  # on standard output it would come between the peer's answers
    ends = Ends("nixl-auto", "target", 1 << 20, {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(log)})
    count = Count()
    ends.receive(0, 1 << 20, key=1)
    assert ends.session.lane == "nixl/net"
    assert (ends.array == noise(1 << 20, SEED)).all()
    assert count.objection(1 << 20) is None
    assert ends.close()[0] == 0
    lines = log.read_text(encoding="utf-8").splitlines()
    puts = [i for i, line in enumerate(lines) if "remote memory write by ucp_put*" in line]
    assert puts, lines
    bulk = next(line for line in lines[puts[-1] :] if "..inf" in line)
    assert f"rc_verbs/{DEVICE}:1" in bulk, bulk


class TiersOverVerbs(TwoTiers):
    """The example's ranks with their real loops, joined over NIXL."""

    def __init__(self, layout: KVLayout, prefill: Shard, decode: Shard) -> None:
        self.layout, self.prefill, self.decode = layout, prefill, decode
        self.plan = ChunkPlan(chunk_tokens=96, layers_per_group=2)
        self.routes = routes(layout, prefill, decode)
        self.kv = {}
        self.transports = [NixlTransport() for _ in range(prefill.num_ranks + decode.num_ranks)]
        opened = iter(self.transports)
        self.senders = [SendingRank(Pages(layout, prefill, rank), next(opened), 1 << 17) for rank in range(prefill.num_ranks)]
        self.receivers = [ReceivingRank(Pages(layout, decode, rank), next(opened), 1 << 20) for rank in range(decode.num_ranks)]
        for number, route in enumerate(self.routes, 1):
            self.join(number, self.senders[route.prefill_rank], route.decode_rank)


async def test_kv_of_prefill_pools_arrives_in_a_decode_pool() -> None:
    """Two prefill ranks into one decode rank of other pages: gather, write into the ring, digest, scatter, bit for bit."""
    layout = KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=64, dtype=DType.FLOAT16)
    tiers = TiersOverVerbs(layout, Shard(tp_size=2, page_size=16), Shard(tp_size=1, page_size=32, order=TokenOrder.HND))
    count = Count()
    tiers.start("a prompt", NUM_TOKENS)
    await tiers.compute("a prompt", NUM_TOKENS)
    async with asyncio.timeout(DEADLINE_S):
        while not tiers.is_idle():
            await asyncio.sleep(0.001)
    moved = sum(sender.sent["a prompt"].num_bytes for sender in tiers.senders)
    assert moved >= NUM_TOKENS * layout.num_layers * 2 * 4 * 64 * 2
    assert count.objection(moved) is None
    tiers.assert_arrived("a prompt", NUM_TOKENS)
    tiers.assert_nothing_is_left()
    tiers.close()
    for transport in tiers.transports:
        transport.close()
