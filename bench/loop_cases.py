"""The cases of `bench.loop` without those of 256 peers: work that a peer, a client or one long prompt can cause in one turn."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import bench.two_tiers
from bench.loop_machines import DECODE_LIFE, Machines, forget_plans
from bench.loop_models import CONTEXT_TOKENS, layouts, llama_3_8b
from bench.loop_turns import Watch
from bench.two_tiers import TwoTiers
from decode_node.admission import Admission, page_needs
from decode_node.offload.context import TierContext
from decode_node.offload.host_tier import HostTier
from decode_node.offload.jobs import Jobs
from decode_node.offload.leader import OffloadLeader
from decode_node.offload.rules import TierRules
from decode_node.offload.tiered_request import DeviceIndex
from decode_node.offload.tiers import PlaceRequest
from node_runtime.rank_link import LeaderLink, RankLink, new_addresses
from prefill_node import rank_messages
from prefill_node.prefix_loads import PrefixLoads
from transfer.chunk import ChunkPlan
from transfer.connector.prompt import checked_prompt
from transfer.control.base import WATCH_BATCH, Received
from transfer.control.unix_channel import UnixControlClient, UnixControlServer
from transfer.instance import Instance
from transfer.layer_groups import PageCounts, layer_groups
from transfer.layout import DType, KVLayout, Shard
from transfer.messages import (
    MAX_CHUNKS_PER_MESSAGE,
    PROTOCOL_VERSIONS,
    GrantRequest,
    GrantsIssued,
    IssuedGrant,
    decode,
    encode,
)
from transfer.metrics import NodeMetrics
from transfer.pool.page_allocator import GroupAllocator
from transfer.receive import events as target
from transfer.receive.receiver import Receiver
from transfer.ring import ALIGNMENT_BYTES, MAX_KEPT_RANGES, MAX_PUBLISHED_RANGES, Grant, Watermark
from transfer.send import events as source
from transfer.send.events import SenderSettings
from transfer.send.sender import Sender
from transfer.transport.base import REGION_ALIGNMENT_BYTES

DEADLINE_S = 120.0
NUM_CANCELLED, NUM_LIVE_GRANTS = 64, 10_000
NUM_TURNS = 5_000  # of all ranks, until a request is given up
TINY = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=DType.FLOAT16)

Run = Callable[[Watch], None]


def storm_of_cancels(watch: Watch, *, is_one_sided: bool, num_cancelled: int = NUM_CANCELLED) -> None:
    """Requests hold all grants that they may; all are cancelled at once, while another one begins.

    Real: both loops of `bench.two_tiers` with their machines, lanes and in-process transport.
    """

    async def main() -> None:
        bench.two_tiers.NUM_PAGES = 64 * num_cancelled
        layout = KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=8, dtype=DType.FLOAT16)
        ring_bytes = num_cancelled * 4 * 4 * 1536  # what the grants of the cancelled requests fill
        prefill, decode = Shard(tp_size=4, page_size=16), Shard(page_size=32)
        tiers = TwoTiers(layout, prefill, decode, is_one_sided=is_one_sided, ring_bytes=ring_bytes)
        receiver = tiers.receivers[0]
        async with asyncio.timeout(DEADLINE_S):
            for number in range(num_cancelled):
                tiers.start(f"request {number}", 100)
            while receiver.loop.ring.num_live_grants < 16 * num_cancelled:
                await asyncio.sleep(0.001)
            watch.start()
            for number in range(num_cancelled):  # a leader's messages to a rank: one turn takes up to `WATCH_BATCH` of them
                receiver.loop.cancel_request(f"request {number}", "its client went away")
            tiers.start("another", 100)
            await tiers.compute("another", 100)
            while "another" not in receiver.complete:
                await asyncio.sleep(0.001)
        tiers.close()

    watch.run(main)


def frozen_writer(watch: Watch) -> None:
    """A prefill node of four ranks freezes with the whole ring granted; another node's request asks for grants.

    Real: the machines, the ring (Llama 3 8B, TP 4 to 1, chunks of 128 tokens, 2 GiB, 8 grants ahead).
    """
    machines = Machines(watch, llama_3_8b(), Shard(tp_size=4), Shard())
    frozen = list(machines.sessions)
    for number in range(32):  # as many as run by default; sixteen fill the ring
        machines.start(f"request {number}", 2048)
        machines.run()
    machines.is_frozen = True
    for session in frozen:
        machines.lose(session, is_over=False)
    machines.replace_senders()
    machines.start("another", 2048)
    machines.compute("another", range(machines.num_chunks(2048)))
    machines.run()
    machines.tick()
    for session in frozen:
        machines.end(session, decode_rank=0)
    machines.run()


def long_prompt(
    watch: Watch, layout: KVLayout, prefill_tp: int, decode_tp: int, *, num_tokens: int = CONTEXT_TOKENS, is_whole: bool = False
) -> None:
    """One prompt that its client cancels in the middle, one that its caller aborts; before them, one that is sent as a whole.

    Real: the machines of every rank, and the ring.

    Args:
        is_whole: Whether one is sent as a whole. What is done for each piece depends on its model only by its size.
    """
    machines = Machines(watch, layout, Shard(tp_size=prefill_tp), Shard(tp_size=decode_tp), is_one_sided=False)
    chunks = range(machines.num_chunks(num_tokens))
    if is_whole:
        machines.start("whole", num_tokens)
        machines.compute("whole", chunks)
        machines.run()
    for name, give_up in (("cancelled", machines.cancel), ("aborted", machines.abort)):
        machines.start(name, num_tokens)
        machines.compute(name, chunks)
        machines.run(most=NUM_TURNS)
        give_up(name)
        machines.tick()
        machines.run()
    machines.check_idle()


def many_grants(watch: Watch, *, num_grants: int = NUM_LIVE_GRANTS) -> None:
    """10,000 grants are live: ticks, cancels of half of them, a request that begins, the rest of them to their end.

    Real: the machines, and a ring that the grants fill.
    """
    num_requests = 10
    chunks = num_tokens = num_grants // num_requests
    plan = ChunkPlan(chunk_tokens=1)
    machines = Machines(
        watch,
        TINY,
        Shard(),
        Shard(),
        is_one_sided=False,
        ring_bytes=num_grants * ALIGNMENT_BYTES,
        grants_ahead=MAX_CHUNKS_PER_MESSAGE,
        num_slots=64,
        plan=plan,
    )
    for number in range(num_requests):
        machines.start(f"request {number}", num_tokens, plan=plan)
        machines.run()
    assert machines.rings[0].num_live_grants == chunks * num_requests
    machines.tick()
    for number in range(0, num_requests, 2):
        machines.cancel(f"request {number}")
    machines.start("another", num_tokens, plan=plan)
    for number in range(1, num_requests, 2):
        machines.compute(f"request {number}", range(chunks))
    machines.compute("another", range(chunks))
    machines.run()
    machines.check_idle()


def many_sessions(watch: Watch, *, num_sessions: int = 256) -> None:
    """A decode rank with a request of each of 256 writers: ticks, then one writer is lost, then the others, one by one.

    Real: the machines, and the ring.
    """
    machines = Machines(watch, llama_3_8b(), Shard(), Shard(), is_one_sided=False)
    sessions = [*machines.sessions, *(machines.open_session(0, 0) for _ in range(num_sessions - 1))]
    for number, session in enumerate(sessions):
        for more in range(2):
            machines.start(f"request {number} {more}", 2048, session=session)
    machines.run()
    machines.tick()
    for session in sessions:
        machines.lose(session)
    machines.run()
    machines.check_idle()


def nearly_whole(watch: Watch, *, num_requests: int = 4, num_tokens: int = CONTEXT_TOKENS) -> None:
    """A decode rank has nearly all of four long prompts. One is cancelled, and the session of one writer is lost.

    Real: the machines of every rank, and the ring.
    """
    machines = _nearly_whole(watch, num_requests, num_tokens)
    machines.tick()
    machines.cancel("request 0")
    machines.run()
    machines.lose(next(iter(machines.sessions)))
    machines.run()
    machines.tick()
    machines.check_idle()


def lost_decode_rank(watch: Watch, *, num_requests: int = 8, num_tokens: int = CONTEXT_TOKENS) -> None:
    """A prefill rank sends eight long prompts to eight decode ranks, and loses its session with one of them.

    Real: the machines of every rank, and the rings.
    """
    machines = Machines(watch, llama_3_8b(), Shard(), Shard(tp_size=8))
    for number in range(num_requests):
        machines.start(f"request {number}", num_tokens)
        machines.compute(f"request {number}", range(machines.num_chunks(num_tokens) // 4))
    machines.run(most=NUM_TURNS)
    machines.tick()
    machines.lose(next(iter(machines.sessions)))
    machines.run()
    machines.tick()
    machines.run()
    machines.check_idle()


def collector_pause(watch: Watch, *, num_requests: int = 8, num_tokens: int = CONTEXT_TOKENS) -> None:
    """A full collection of the garbage collector in a decode rank that has nearly all of eight long prompts.

    Real: the receiving machine and its ring. The writers' machines are forgotten before.
    """
    machines = _nearly_whole(Watch(), num_requests, num_tokens)
    for rank in machines.senders:
        rank.machine = Sender(SenderSettings(slot_bytes=REGION_ALIGNMENT_BYTES), incarnation=1)
    forget_plans()
    gc.collect()
    watch.turn("full collection", gc.collect, with_gc=True)


def _nearly_whole(watch: Watch, num_requests: int, num_tokens: int) -> Machines:
    """All but the last chunk; side by side, for what waits for its chunk holds its part of the ring."""
    machines = Machines(watch, llama_3_8b(), Shard(tp_size=8), Shard())
    names = [f"request {number}" for number in range(num_requests)]
    for name in names:
        machines.start(name, num_tokens)
    for chunk in range(machines.num_chunks(num_tokens) - 1):
        for name in names:
            machines.compute(name, [chunk])
    machines.run()
    assert machines.rings[0].num_live_grants == len(machines.routes) * num_requests
    return machines


def repeated_questions(watch: Watch, *, num_chunks: int = MAX_CHUNKS_PER_MESSAGE, num_messages: int = WATCH_BATCH) -> None:
    """A writer asks for the same 1,024 grants again and again, faster than the decode rank answers.

    Real: the control channel over a socket file, the messages' encoding, the receiving machine, and its ring.
    """

    async def main(folder: str) -> None:
        plan = ChunkPlan(chunk_tokens=1)
        machines = Machines(Watch(), TINY, Shard(), Shard(), grants_ahead=num_chunks)
        machines.start("request", num_chunks, plan=plan)
        (question,) = [event for event in machines.receivers[0].events if isinstance(event.message, GrantRequest)]
        payload = encode(question.message)
        receiver, answers = machines.receivers[0].machine, 0
        assert isinstance(receiver, Receiver)
        server = UnixControlServer(f"unix://{folder}/control")
        server.allow(question.session)
        client = UnixControlClient(server.address, session_id=question.session)
        client.watch(asyncio.get_running_loop(), lambda payload: None)  # the loop sends what the socket cannot take at once

        def on_received(received: Received) -> None:
            nonlocal answers
            event = target.MessageArrived(session=received.peer, message=decode(received.payload))
            for action in receiver.handle(event, 0.0):
                if isinstance(action, target.Send):
                    encode(action.message)
                    answers += 1

        for _ in range(num_messages):
            assert client.send(payload)
        await asyncio.sleep(0.1)  # wait until all have arrived, so that the first batch is full
        watch.start()
        server.watch(asyncio.get_running_loop(), on_received)
        async with asyncio.timeout(DEADLINE_S):
            while answers < num_messages:
                await asyncio.sleep(0)
        client.close()
        server.close()

    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        watch.run(lambda: main(folder))


def dear_looks(watch: Watch, *, num_laps: int = MAX_KEPT_RANGES - 1, num_chunks: int = MAX_CHUNKS_PER_MESSAGE) -> None:
    """A decode rank announces a released range in each of 1,023 laps of its ring, and then has 2,048 grants looked at at once.

    Real: the sending machine. A look for what is in a grant's way goes back through all laps.
    """
    lap_cells = 2 * num_chunks + 1
    lap_bytes = lap_cells * ALIGNMENT_BYTES

    def cells(lap: int, begin: int, end: int) -> Grant:
        return Grant(lap * lap_bytes + begin * ALIGNMENT_BYTES, lap * lap_bytes + end * ALIGNMENT_BYTES)

    machines = Machines(watch, TINY, Shard(), Shard(), ring_bytes=lap_bytes, grants_ahead=num_chunks)
    (session,), sender, plan = machines.sessions, machines.senders[0], ChunkPlan(chunk_tokens=1)

    def announce(sequence: int, position: int, ranges: tuple[Grant, ...] = ()) -> None:
        watermark = Watermark(incarnation=DECODE_LIFE, sequence=sequence, position=position, released=ranges)
        sender.events.append(source.WatermarkArrived(session=session, watermark=watermark))
        machines.run_sender()

    for sequence, first in enumerate(range(1, num_laps, MAX_PUBLISHED_RANGES), start=1):
        laps = range(first, min(first + MAX_PUBLISHED_RANGES, num_laps))
        announce(sequence, 0, tuple(cells(lap, 0, lap_cells - 1) for lap in laps))
    for number in range(2):
        name = f"request {number}"
        machines.start(name, num_chunks, plan=plan)
        spans = [cells(num_laps, cell, cell + 1) for cell in range(number * num_chunks, (number + 1) * num_chunks)]
        grants = tuple(IssuedGrant(chunk=chunk, begin=span.begin, end=span.end) for chunk, span in enumerate(spans))
        issued = GrantsIssued(incarnation=DECODE_LIFE, request_id=name, route=0, grants=grants)
        sender.events.append(source.MessageArrived(session=session, message=issued))
        machines.compute(name, range(num_chunks))
        machines.run_sender()
    announce(1 << 20, (lap_cells - 1) * ALIGNMENT_BYTES)  # what was in the way of all of them


def dear_grants(watch: Watch, *, num_laps: int = 4000, num_chunks: int = MAX_CHUNKS_PER_MESSAGE) -> None:
    """A writer has one small grant in each of 4,000 laps of a ring, and asks for 1,024 more at once.

    Real: the receiving machine, and its ring, which is brought there without the machine.
    """
    machines = Machines(watch, TINY, Shard(), Shard(), ring_bytes=64 * ALIGNMENT_BYTES, grants_ahead=num_chunks)
    ring = machines.rings[0]
    for _ in range(num_laps):
        ring.release(ring.assign(63 * ALIGNMENT_BYTES))
        ring.assign(ALIGNMENT_BYTES)
    machines.start("request", num_chunks, plan=ChunkPlan(chunk_tokens=1))
    machines.run(most=2 * num_chunks)
    machines.tick()


# Pages of one token


def hash_chains(watch: Watch, *, num_tokens: int = CONTEXT_TOKENS, page_size: int = 1) -> None:
    """The names of a prompt's pages, at the decode leader with host memory and at the prefill leader with a store.

    Real: `OffloadLeader`, `PrefixLoads`, the check of a prompt, the link between a leader and a rank. The store has all pages.
    """
    tokens = tuple(number % 50_000 for number in range(num_tokens))

    async def main() -> None:
        own = _instance(page_size)
        leader = OffloadLeader(
            _context(num_tokens, page_size), slack_pages=0, seed_of=lambda salt, prefill: salt.encode(), store=None
        )
        store = _AllStored()
        heard: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
            link = LeaderLink(new_addresses(Path(folder), 1), rank_messages.CODEC)
            rank = RankLink(link.addresses[0], rank_messages.CODEC)
            rank.watch(asyncio.get_running_loop(), heard.set_result)
            connected = asyncio.Event()
            link.watch(asyncio.get_running_loop(), lambda number, message: connected.set())
            rank.send(rank_messages.PrefixLoaded(request_id="another", num_tokens=0))
            async with asyncio.timeout(DEADLINE_S):
                await connected.wait()

            def broadcast(message: object) -> None:
                assert link.broadcast(message)

            loads = PrefixLoads(
                store,  # type: ignore[arg-type]  # all that is asked of a client here
                own=own,
                store_salt="",
                timeout_s=DEADLINE_S,
                broadcast=broadcast,
                on_loaded=lambda request_id, count: None,
                on_task_over=lambda task: None,
            )
            watch.start()
            checked_prompt(tokens, max_context_tokens=2 * num_tokens, vocab_size=50_000)
            await asyncio.sleep(0)
            prompt = await leader.look_up(tokens, "", prefill=own, may_skip=True)
            await asyncio.sleep(0)
            leader.place(
                PlaceRequest(
                    request_id="request", prompt=prompt, max_new_tokens=1, chunk_tokens=128, may_skip=True, accepted_s=0.0
                )
            )
            await asyncio.sleep(0)
            loads.begin("request", tokens, own, cache_salt="")
            async with asyncio.timeout(DEADLINE_S):
                await heard
            await loads.close()
            rank.close()
            link.close()

    watch.run(main)


def step_tables(watch: Watch, *, num_requests: int = 32, num_tokens: int = 130_000, page_size: int = 1) -> None:
    """Steps of 32 requests of 130,000 tokens: the page tables that a decode rank makes on its loop.

    Real: the rank's allocator. A turn is all requests of a step.
    """
    groups = layer_groups(TINY)
    allocator = GroupAllocator(page_needs(groups, page_size), [num_requests * -(-CONTEXT_TOKENS // page_size)])
    for number in range(num_requests):
        assert allocator.reserve(f"request {number}", CONTEXT_TOKENS)
        watch.turn("first table of a request", lambda number=number: allocator.cover(f"request {number}", num_tokens))  # type: ignore[misc]

    def step(position: int) -> None:
        for number in range(num_requests):
            allocator.advance(f"request {number}", position)
            allocator.cover(f"request {number}", position + 1)

    for count in range(8):
        watch.turn("step", lambda count=count: step(num_tokens + count))  # type: ignore[misc]
    for number in range(num_requests):
        watch.turn("release", lambda number=number: allocator.release(f"request {number}"))  # type: ignore[misc]


class _AllStored:
    """Of a `StoreClient`: every page is there."""

    async def exists(self, keys: Sequence[str], *, timeout_s: float | None = None) -> list[bool]:
        await asyncio.sleep(0)
        return [True] * len(keys)

    async def close(self) -> None:
        pass


def _instance(page_size: int) -> Instance:
    return Instance(
        incarnation=1,
        layout=llama_3_8b(),
        shard=Shard(tp_size=4, page_size=page_size),
        transport="ucx",
        digests=("xxh3-64",),
        protocol_versions=PROTOCOL_VERSIONS,
    )


def _context(num_tokens: int, page_size: int) -> TierContext:
    groups = layer_groups(TINY)
    num_pages = num_tokens // page_size + 64
    return TierContext(
        rules=TierRules(
            page_size=page_size, pool_pages=num_pages, stride_pages=1, window_tokens=None, high_water=0.9, low_water=0.5
        ),
        groups=groups,
        tier=HostTier((num_pages,)),
        on_device=DeviceIndex(groups),
        admission=Admission(pool_pages=PageCounts((num_pages,)), needs=page_needs(groups, page_size), max_running=8),
        jobs=Jobs(1),
        broadcast=lambda message: None,
        metrics=NodeMetrics(role="decode"),
        advice="",
    )


def prompts(num_tokens: int = CONTEXT_TOKENS) -> Iterator[tuple[str, Run]]:
    """A case for each kind of model and each direction; families whose KV is alike are one kind."""
    kinds: dict[KVLayout, list[str]] = {}
    for name, layout in layouts().items():
        kinds.setdefault(layout, []).append(name.removesuffix("ForCausalLM"))
    for layout, names in kinds.items():
        for prefill_tp, decode_tp in ((8, 1), (1, 8)):

            def run(
                watch: Watch,
                layout: KVLayout = layout,
                names: list[str] = names,
                tp: tuple[int, int] = (prefill_tp, decode_tp),
            ) -> None:
                long_prompt(watch, layout, *tp, num_tokens=num_tokens, is_whole="Llama" in names)

            yield f"{num_tokens:,} tokens, TP {prefill_tp} to {decode_tp}: {', '.join(names)}", run
