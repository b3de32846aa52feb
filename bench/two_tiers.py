"""Both tiers of a transfer in one process, with all their parts at hand: for tests and benchmarks of the two loops.

`transfer.local_pair` is the same for users. Here, a caller can replace parts, and sees pages, ring and sessions.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.control.inproc_channel import InprocControlServer
from transfer.copy.digest import DIGEST_XXH3
from transfer.layout import KVLayout, Route, Shard, routes, wire_dtype
from transfer.local_pair import inproc_context
from transfer.piece import RankRequest, SessionRoute
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_allocator import PageAllocator
from transfer.pool.staging import StagingBuffer
from transfer.receive.loop import ReceiverLoop
from transfer.ring import Watermark
from transfer.send.events import SenderSettings, SentStats
from transfer.send.loop import SenderLoop
from transfer.transport.base import Transport
from transfer.transport.inproc import InprocHub, InprocTransport

NUM_PAGES, NUM_SLOTS = 128, 3


class Crash(Exception):
    """A loop met an error that nobody expected."""


def crash(error: BaseException) -> None:
    raise Crash from error


class Pages:
    """A pool, and who has which pages of it."""

    def __init__(self, layout: KVLayout, shard: Shard, rank: int) -> None:
        self.pool = KVPool(layout=layout, shard=shard.at(rank), num_pages=NUM_PAGES)
        self.allocator = PageAllocator(NUM_PAGES)

    def up_to(self, request_id: str, num_tokens: int) -> Sequence[int]:
        missing = -(-num_tokens // self.pool.page_size) - len(self.allocator.pages(request_id))
        self.allocator.bind(request_id, max(0, missing))
        return self.allocator.pages(request_id)

    def slots(self, request_id: str, num_tokens: int) -> Tensor:
        pages = torch.tensor(self.up_to(request_id, num_tokens))
        tokens = torch.arange(num_tokens)
        return pages[tokens // self.pool.page_size] * self.pool.page_size + tokens % self.pool.page_size


class SendingRank:
    """A prefill rank; a `transfer.send.loop.SenderOwner`."""

    def __init__(self, pages: Pages, transport: Transport, slot_bytes: int) -> None:
        self.pages = pages
        self.sent: dict[str, SentStats] = {}
        self.failed: dict[str, str] = {}
        self.closed: list[int] = []
        self.sessions: dict[int, int] = {}  # decode rank -> session
        self.transport = transport
        self.loop = SenderLoop(
            context=inproc_context(pages.pool, transport, role="prefill", incarnation=1, on_crash=crash),
            owner=self,
            pool=self.pages.pool,
            staging=StagingBuffer(num_bytes=NUM_SLOTS * slot_bytes),
            settings=SenderSettings(num_slots=NUM_SLOTS, slot_bytes=slot_bytes, grants_ahead=4, repeat_after_s=0.2),
        )
        self.loop.watch_sessions(lambda session, reason: self.closed.append(session))

    def tables_of(self, request_id: str) -> Sequence[Sequence[int]]:
        return (self.pages.allocator.pages(request_id),)

    def on_source_released(self, request_id: str) -> None:
        self.pages.allocator.release(request_id)

    def on_sent(self, request_id: str, stats: SentStats) -> None:
        self.sent[request_id] = stats

    def on_failed(self, request_id: str, reason: str) -> None:
        self.failed[request_id] = reason


class ReceivingRank:
    """A decode rank; a `transfer.receive.loop.ReceiverOwner`."""

    def __init__(
        self, pages: Pages, transport: Transport, ring_bytes: int, *, loop_type: type[ReceiverLoop] = ReceiverLoop
    ) -> None:
        self.pages = pages
        self.complete: set[str] = set()
        self.failed: dict[str, tuple[str, bool]] = {}
        self.drained: set[str] = set()
        self.closed: list[int] = []
        self.writers: dict[int, SendingRank] = {}  # session -> who hears its watermarks
        self.transport = transport
        self.control = InprocControlServer()
        self.loop = loop_type(
            context=inproc_context(pages.pool, transport, role="decode", incarnation=2, on_crash=crash),
            owner=self,
            pool=self.pages.pool,
            ring_memory=StagingBuffer(num_bytes=ring_bytes),
            control=self.control,
        )
        self.loop.watch_sessions(self._on_session_closed, self._publish)

    def tables_up_to(self, request_id: str, num_tokens: int) -> Sequence[Sequence[int]]:
        return (self.pages.up_to(request_id, num_tokens),)

    def on_complete(self, request_id: str) -> None:
        self.complete.add(request_id)

    def on_failed(self, request_id: str, reason: str, *, is_data_loss: bool) -> None:
        self.failed[request_id] = (reason, is_data_loss)

    def on_drained(self, request_id: str) -> None:
        self.drained.add(request_id)
        self.pages.allocator.release(request_id)

    def _on_session_closed(self, session: int, reason: str) -> None:
        self.writers.pop(session, None)
        self.closed.append(session)

    def _publish(self, watermark: Watermark, sessions: frozenset[int] | None) -> None:
        # Writers beyond `sessions` would have to hear of it now and then; that all do at once costs little in one process.
        for session, writer in self.writers.items():
            asyncio.get_running_loop().call_soon(writer.loop.on_watermark, session, watermark)


class TwoTiers:
    """Every rank of both instances, joined wherever there is a route."""

    def __init__(
        self,
        layout: KVLayout,
        prefill: Shard,
        decode: Shard,
        *,
        is_one_sided: bool,
        ring_bytes: int = 1 << 14,
        receiver_type: type[ReceiverLoop] = ReceiverLoop,
    ) -> None:
        self.layout, self.prefill, self.decode = layout, prefill, decode
        self.plan = ChunkPlan(chunk_tokens=24, layers_per_group=2)
        self.routes = routes(layout, prefill, decode)
        self.kv: dict[str, list[tuple[Tensor, Tensor]]] = {}
        hub = InprocHub()
        self.senders = [
            SendingRank(Pages(layout, prefill, rank), InprocTransport(hub, one_sided=is_one_sided), 1 << 13)
            for rank in range(prefill.num_ranks)
        ]
        self.receivers = [
            ReceivingRank(
                Pages(layout, decode, rank), InprocTransport(hub, one_sided=is_one_sided), ring_bytes, loop_type=receiver_type
            )
            for rank in range(decode.num_ranks)
        ]
        for number, (prefill_rank, decode_rank) in enumerate(sorted({(r.prefill_rank, r.decode_rank) for r in self.routes}), 1):
            self.join(number, self.senders[prefill_rank], decode_rank)

    def join(self, number: int, sender: SendingRank, decode_rank: int) -> None:
        """What `Attach` does between processes: both halves of the data plane, the control channel, the first watermark."""
        receiver = self.receivers[decode_rank]
        offer = sender.transport.offer()
        target, answer = receiver.transport.accept(offer.blob, receiver.loop.memory)
        receiver.loop.driver.add(target)
        receiver.loop.open_session(number, target, incarnation=1)
        receiver.writers[number] = sender
        writer = offer.complete(answer)
        sender.loop.driver.add(writer)
        sender.loop.open_session(
            number,
            writer,
            receiver.control.connect(number),
            name=f"decode rank {decode_rank}",
            incarnation=2,
            ring_capacity_bytes=receiver.loop.ring.capacity_bytes,
        )
        sender.loop.on_watermark(number, receiver.loop.ring.watermark())
        sender.sessions[decode_rank] = number

    def start(self, request_id: str, num_tokens: int) -> None:
        """Reserve pages for a request on every rank, and begin its transfer; nothing of it is computed yet."""
        for receiver in self.receivers:
            assert receiver.pages.allocator.reserve(request_id, -(-num_tokens // self.decode.page_size))
        for sender in self.senders:
            assert sender.pages.allocator.reserve(request_id, -(-num_tokens // self.prefill.page_size))
        self.begin(request_id, num_tokens)

    def begin(self, request_id: str, num_tokens: int) -> None:
        """Expect a request on every decode rank, then start it on every prefill rank."""
        for rank, receiver in enumerate(self.receivers):
            incoming = [route for route in self.routes if route.decode_rank == rank]
            receiver.loop.expect_request(self._rank_request(request_id, num_tokens, incoming))
        for rank, sender in enumerate(self.senders):
            outgoing = [route for route in self.routes if route.prefill_rank == rank]
            sender.loop.start_request(self._rank_request(request_id, num_tokens, outgoing))

    def _rank_request(self, request_id: str, num_tokens: int, of_rank: Sequence[Route]) -> RankRequest:
        """Return the part of a request for a rank with these routes."""
        return RankRequest(
            request_id=request_id,
            layout=self.layout,
            plan=self.plan,
            wire_dtype=wire_dtype(self.layout, self.prefill, self.decode),
            digest=DIGEST_XXH3,
            num_tokens=num_tokens,
            start_token=0,
            routes=tuple(
                SessionRoute(route=route, session=self.senders[route.prefill_rank].sessions[route.decode_rank])
                for route in of_rank
            ),
        )

    async def compute(self, request_id: str, num_tokens: int) -> None:
        """The engine: write KV chunk by chunk into the prefill pools, and say so after each."""
        generator = torch.Generator().manual_seed(zlib.crc32(request_id.encode()))
        self.kv[request_id] = [
            (
                torch.randn(num_tokens, spec.num_kv_heads, spec.k_head_dim, generator=generator).half(),
                torch.randn(num_tokens, spec.num_kv_heads, spec.v_head_dim, generator=generator).half(),
            )
            for spec in self.layout.layers
        ]
        for chunk in split_into_chunks(self.plan, num_tokens=num_tokens, num_layers=self.layout.num_layers):
            for rank, sender in enumerate(self.senders):
                if request_id not in sender.pages.allocator.owners():
                    continue  # given up meanwhile
                slots = sender.pages.slots(request_id, chunk.tokens.end)[chunk.tokens.begin :]
                layers = chunk.layers.intersect(sender.pages.pool.shard.layers(self.layout))
                for layer in range(layers.begin, layers.end):
                    heads = self.prefill.at(rank).heads(self.layout.layers[layer].num_kv_heads)
                    k, v = (x[chunk.tokens.begin : chunk.tokens.end, heads.begin : heads.end] for x in self.kv[request_id][layer])
                    sender.pages.pool.write(layer, slots, k, v)
                sender.loop.chunk_computed(request_id, chunk.index, None)
            await asyncio.sleep(0)

    def assert_arrived(self, request_id: str, num_tokens: int) -> None:
        """Every decode rank has exactly the KV of its heads, bit for bit; then its pages are given back."""
        for rank, receiver in enumerate(self.receivers):
            slots = receiver.pages.slots(request_id, num_tokens)
            for layer, (k, v) in enumerate(self.kv[request_id]):
                heads = self.decode.at(rank).heads(self.layout.layers[layer].num_kv_heads)
                found_k, found_v = receiver.pages.pool.read(layer, slots)
                assert torch.equal(found_k, k[:, heads.begin : heads.end]), f"K of layer {layer} on decode rank {rank}"
                assert torch.equal(found_v, v[:, heads.begin : heads.end]), f"V of layer {layer} on decode rank {rank}"
            receiver.pages.allocator.release(request_id)

    def assert_nothing_is_left(self) -> None:
        for sender in self.senders:
            assert sender.loop.num_requests == sender.loop.num_slots_used == 0
            assert sender.pages.allocator.num_free == NUM_PAGES
            sender.loop.check_idle()
        for receiver in self.receivers:
            assert receiver.loop.num_requests == 0 and receiver.loop.ring.num_live_grants == 0
            assert receiver.loop.ring.live_bytes == receiver.loop.ring.quarantined_bytes == 0
            assert receiver.pages.allocator.num_free == NUM_PAGES
            receiver.loop.check_idle()

    def is_idle(self) -> bool:
        return not any(sender.loop.num_requests for sender in self.senders) and not any(
            receiver.loop.num_requests or receiver.loop.ring.num_live_grants for receiver in self.receivers
        )

    def close(self) -> None:
        for sender in self.senders:
            sender.loop.close()
        for receiver in self.receivers:
            receiver.loop.close()
