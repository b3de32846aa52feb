"""A decode leader's tiers with two real ranks: real leader, workers, allocators, pools and copies; threads and links by hand.

KV is a function of the tokens up to its position, so a step that reads a page that is another's, or old, or not there yet, reads
something else than it must. Every step checks every token that it reads, wherever that lies.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from decode_node.admission import page_needs
from decode_node.offload.leader import OffloadLeader
from decode_node.offload.rank import OffloadRank
from decode_node.offload.rules import StoreRules
from decode_node.offload.running_blocks import RunningBlocks
from decode_node.offload.store_leader import StoreLeader, StoreSettings
from decode_node.offload.tiers import PlaceRequest, Prompt
from decode_node.rank_messages import DecodeStepPart, ExpectRequest, FinishRequest, JobDone, RunDecodeStep, StoredKVLost
from node_runtime.rank_messages import StepDone
from tests.decode.workers import Receiver, new_worker, use
from tests.offload.tier_contexts import tier_context
from tests.runtime.instances import instance
from transfer.chunk import ChunkPlan, split_into_chunks
from transfer.connector.messages import CancelIncoming, PagesReleased, TransferExpected, TransferWhole
from transfer.engine_types import DecodeItem, SamplingParams
from transfer.layer_groups import NO_PAGE, GroupKind, PageCounts, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard
from transfer.metrics import RankMetrics
from transfer.piece import TransferTerms
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_allocator import GroupAllocator
from transfer.rank_context import RankContext
from transfer.storage.keys import RUNNING_SUFFIX, chain_seed, store_fingerprint, store_key

PAGE, CHUNK = 2, 4
NUM_RANKS = 2
PREFILL_LIFE = 11
PLAN = ChunkPlan(chunk_tokens=CHUNK)
WINDOW_TOKENS = 6
FULL_SPEC = LayerSpec(num_kv_heads=2, k_head_dim=2, v_head_dim=2)
WINDOW_SPEC = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=2, k_head_dim=2, v_head_dim=2, window_tokens=WINDOW_TOKENS)
NO_GOOD = struct.pack("<f", -1.0)
PREFILL, DECODE = instance(1), instance(2)
FINGERPRINT = store_fingerprint(DECODE)


class HandThread:
    """A `WorkerThread` whose work is done when the world says so, one piece after the other."""

    def __init__(self) -> None:
        self.work: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()

    def submit(self, work: Callable[[], Any], on_done: Callable[[Any], None]) -> None:
        self.work.append((work, on_done))

    def run(self) -> None:
        work, on_done = self.work.popleft()
        on_done(work())

    def close(self, timeout_s: float) -> bool:
        return True


class MemoryStore:
    """A rank's, or the leader's, `StoreClient`, on a dictionary that all share; some pages fail."""

    def __init__(self, pages: dict[str, bytes], chance: random.Random, failing: float) -> None:
        self.pages, self._chance, self._failing = pages, chance, failing
        self.num_queued = 0

    def _works(self) -> bool:
        return self._chance.random() >= self._failing

    name = "memory"

    async def put(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int | None = None) -> list[bool]:
        await asyncio.sleep(0)
        done = []
        for key, view in pages:
            if works := self._works():
                assert self.pages.setdefault(key, bytes(view)) == bytes(view), "equal keys, and other bytes"
            done.append(works)
        return done

    async def get(self, pages: Sequence[tuple[str, memoryview]], *, used_ns: int) -> list[bool]:
        await asyncio.sleep(0)
        found = []
        for key, view in pages:
            is_there = key in self.pages and self._works()
            if is_there:
                view[:] = self.pages[key]
            found.append(is_there)
        return found

    async def exists(self, keys: Sequence[str], *, timeout_s: float) -> list[bool]:
        await asyncio.sleep(0)
        return [key in self.pages and self._works() for key in keys]

    async def delete(self, keys: Sequence[str]) -> list[bool]:
        for key in keys:
            self.pages.pop(key, None)
        return [True] * len(keys)

    async def close(self) -> None:
        pass


def values_of(token_ids: Sequence[int]) -> list[float]:
    """One number for each token, of it and all before it; exact in float32."""
    found, state = [], 1
    for token in token_ids:
        state = (state * 7919 + token + 1) % 1_000_003
        found.append(float(state))
    return found


def next_token(token: int, position: int) -> int:
    """The token behind a token at its position, as every engine of the world computes it."""
    return (token * 31 + position) % 50


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request of the world."""

    request_id: str
    prompt: list[int]
    max_new: int
    salt: str
    last_new: int  # tokens after which it ends, as by an end token
    known: Prompt | None = None
    tokens: list[int] = field(default_factory=list)  # prompt and generated
    start_token: int = 0
    is_placed: bool = False
    is_followed: bool = False  # its first pages move on to the store as they arrive
    arriving: dict[int, list[Any]] = field(default_factory=dict)  # chunks that each rank has not
    receiving: set[int] = field(default_factory=set)
    holding: set[int] = field(default_factory=set)
    is_running: bool = False
    is_over: bool = False
    is_lost: bool = False  # the store has failed it
    is_damaged: bool = False  # as far as anybody knows: what it reads may be anything

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def position(self) -> int:
        return len(self.tokens) - 1


class RankWorld:
    """One rank: a real worker, without an engine, sessions or a receiver."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.inbox: deque[object] = deque()
        self.engine_thread = HandThread()
        self.shard = Shard(tp_size=NUM_RANKS, tp_rank=rank, page_size=PAGE)
        self.pool = KVPool(layout=world.layout, shard=self.shard, num_pages=world.device_pages)
        self.host = HostPool(self.pool, num_pages=world.host_pages)
        needs = page_needs(self.pool.groups, PAGE, slack_tokens=world.slack_tokens + max(1, world.num_drafts))
        self.allocator = GroupAllocator(needs, self.pool.num_pages)
        self.receiver = Receiver()
        self.worker = new_worker(rank=rank, thread=self.engine_thread, send=self._send)
        self.save_thread, self.load_thread, self.reader = HandThread(), HandThread(), HandThread()
        self._chosen: dict[str, int] = {}  # tokens of the last step
        self.num_read = 0  # steps whose tokens were read
        threads = {"save": self.save_thread, "load": self.load_thread}
        context = RankContext(
            loop=asyncio.get_running_loop(),
            instance=DECODE,
            rank=rank,
            device=self.pool.device,
            transport=cast(Any, None),
            metrics=RankMetrics(role="decode", rank=rank),
            on_crash=world.crashed.append,
        )
        client: Any = world.store()
        blocks = None
        if world.block_pages:
            blocks = RunningBlocks(
                self.host,
                client,
                loop=context.loop,
                instance=DECODE,
                pool=self.pool,
                pages_per_block=world.block_pages,
                num_buffers=1,
                pause_s=0.0,
            )
        self.blocks = blocks
        self.offload = OffloadRank(
            context,
            pool=self.pool,
            host=self.host,
            allocator=self.allocator,
            engine_thread=self.engine_thread,  # type: ignore[arg-type]
            send=self._send,
            on_free=self.worker.on_copies_over,
            store=client,
            blocks=blocks,
            buffer_bytes=1 << 20,
            open_thread=lambda name, *_: threads[name],  # type: ignore[arg-type,return-value]
        )
        use(
            self.worker,
            engine=self,
            allocator=self.allocator,
            receiver=self.receiver,
            writers=TransferTerms(layout=world.layout, wire_dtype=DType.FLOAT32, routes=(), digest="xxh3-64", scales=None),
            offload=self.offload,
            reader=self.reader if world.max_steps > 1 else None,
        )

    def _send(self, message: object) -> None:
        self.world.from_ranks.append((self.rank, message))

    @property
    def threads(self) -> list[HandThread]:
        return [self.engine_thread, self.save_thread, self.load_thread, self.reader]

    # What a rank's engine does

    def decode(self, items: Sequence[DecodeItem]) -> dict[str, int]:
        return {request_id: token for request_id, (token,) in self.verify(items).items()}

    def begin_decode(self, items: Sequence[DecodeItem]) -> Callable[[], dict[str, int]]:
        """The KV that a step reads must be there until its tokens are read, because a GPU reads in the meantime.

        Until then, all free pages are overwritten. Rank 0 returns a token only after the other ranks have read the KV for it.
        """
        items = [replace(item, token_id=self._chosen[item.request_id]) if item.is_unread else item for item in items]
        self._chosen = {item.request_id: next_token(item.token_id, item.position) for item in items}
        values = {item.request_id: self._values(item) for item in items}
        tokens = self.decode(items)

        def read() -> dict[str, int]:
            self.num_read += 1
            if self.rank and self.num_read <= self.world.ranks[0].num_read:
                return tokens
            for part, (_, pages) in zip(self.pool.parts, self.allocator.by_group, strict=True):
                self._spoil(part, pages.accounts().unbound)
            for item in items:
                self._check(item, item.position, values[item.request_id])
            return tokens

        return read

    def _values(self, item: DecodeItem) -> list[float]:
        return values_of((*self.world.jobs[item.request_id].tokens[: item.position], *item.token_ids))

    def verify(self, items: Sequence[DecodeItem]) -> dict[str, tuple[int, ...]]:
        tokens: dict[str, tuple[int, ...]] = {}
        for item in items:
            job = self.world.jobs[item.request_id]
            assert [item.token_id] == job.tokens[item.position :][:1] or item.is_unread  # rank 0 can be a step ahead
            assert not (item.draft_token_ids and (any(item.host_tables) or item.stored_blocks)), "each row would read all of them"
            values = self._values(item)
            for position in range(item.position, item.end_token):
                self._write(item.page_tables, position, values[position])
            for position in range(item.position, item.end_token):
                self._check(item, position, values)
            self.world.most_stored = max(self.world.most_stored, len(item.stored_blocks))
            own = [next_token(item.token_id, item.position)]
            while own == list(item.draft_token_ids[: len(own)]):
                own.append(next_token(own[-1], item.position + len(own)))
            tokens[item.request_id] = tuple(own)
        return tokens if self.rank == 0 else {}

    def _check(self, item: DecodeItem, position: int, values: Sequence[float]) -> None:
        """Read what the token at `position` attends to."""
        if self.world.jobs[item.request_id].is_damaged:
            return
        for index, group in enumerate(self.pool.groups):
            host = item.host_tables[index] if item.host_tables else ()
            for token in range(group.first_needed_token(position), position + 1):
                found = self._read(index, item.page_tables[index], host, item.stored_blocks, token)
                assert found == values[token], (item.request_id, self.rank, group.name, token, position, len(host))

    def _write(self, tables: Sequence[Sequence[int]], token: int, value: float) -> None:
        for index in range(len(self.pool.groups)):
            self.write_group(self.pool.parts[index], tables[index], token, value)

    @staticmethod
    def write_group(part: Any, table: Sequence[int], token: int, value: float) -> None:
        page = table[token // PAGE]
        assert page != NO_PAGE
        for layer in part.layers:
            for is_v in (False, True):
                part.buffer(layer, is_v=is_v)[page, token % PAGE] = value + layer + 0.5 * is_v

    def _read(self, index: int, table: Sequence[int], host: Sequence[int], stored: tuple[int, ...], token: int) -> float:
        entry, num_stored = token // PAGE, len(stored) * self.world.block_pages if index == 0 else 0
        if entry < num_stored:
            assert table[entry] == NO_PAGE
            return self._read_stored(stored[entry // self.world.block_pages], token % (self.world.block_pages * PAGE))
        in_host = entry - num_stored < len(host)
        part = self.host.part(index) if in_host else self.pool.parts[index]
        page = host[entry - num_stored] if in_host else table[entry]
        assert (table[entry] == NO_PAGE) == in_host, "a token is read in one tier, and in one only"
        assert page != NO_PAGE
        return self._one_number(
            [
                part.buffer(layer, is_v=is_v)[page, token % PAGE] - layer - 0.5 * is_v
                for layer in part.layers
                for is_v in (False, True)
            ]
        )

    def _read_stored(self, block: int, token: int) -> float:
        """A token of a block in the store, of which each layer is one object."""
        assert self.blocks is not None
        values = []
        for layer, key in self.blocks.keys_of(block).items():
            pages = torch.frombuffer(bytearray(self.world.stored[key]), dtype=torch.float32)
            k_and_v = pages.view(self.world.block_pages, 2, PAGE, -1)
            values += [k_and_v[token // PAGE, is_v, token % PAGE] - layer - 0.5 * is_v for is_v in (0, 1)]
        return self._one_number(values)

    @staticmethod
    def _one_number(values: Sequence[torch.Tensor]) -> float:
        flat = torch.stack(list(values)).flatten()
        assert bool((flat == flat[0]).all())
        return float(flat[0])

    def spoil(self, request_id: str) -> None:
        """Its KV on the device is no good."""
        if request_id in self.allocator.full.owners():
            for part, table in zip(self.pool.parts, self.allocator.tables(request_id), strict=True):
                self._spoil(part, [page for page in table if page != NO_PAGE])

    def spoil_host(self, group: int, page: int) -> None:
        self._spoil(self.host.part(group), [page])

    @staticmethod
    def _spoil(part: Any, pages: Sequence[int]) -> None:
        for layer in part.layers:
            for is_v in (False, True):
                for page in pages:
                    part.buffer(layer, is_v=is_v)[page] = struct.unpack("<f", NO_GOOD)[0]

    # What arrives

    def next_chunk(self, job: Job) -> int | None:
        """The first of the chunks that may arrive now, as the receiver gives grants."""
        held = self.offload.held_tokens(job.request_id)
        for place, chunk in enumerate(job.arriving[self.rank]):
            if held is None or chunk.tokens.end <= held.begin or held.end <= chunk.tokens.begin:
                return place
        return None

    def arrive(self, job: Job) -> None:
        place = self.next_chunk(job)
        assert place is not None
        chunk = job.arriving[self.rank].pop(place)
        values = values_of(job.prompt)
        tables = self.worker.tables_up_to(job.request_id, chunk.tokens.end)
        in_host = self.offload.arrives_in_host(job.request_id, chunk.tokens)
        if in_host:
            tables = self.offload.host_tables(job.request_id, tables)
        for index, group in enumerate(self.pool.groups):
            part = self.host.part(index) if in_host and index == 0 else self.pool.parts[index]
            for token in range(max(chunk.tokens.begin, group.first_travelling_token(len(job.prompt))), chunk.tokens.end):
                self.write_group(part, tables[index], token, values[token])
        if job.is_followed:
            begins = [chunk.tokens.begin for chunk in job.arriving[self.rank]]
            self.offload.arrived(job.request_id, min(begins, default=len(job.prompt)))
        if not job.arriving[self.rank]:
            self.worker.incoming.on_complete(job.request_id)


class World:
    """Everything; made inside a running loop."""

    def __init__(
        self,
        chance: random.Random,
        *,
        device_pages: int = 16,
        host_pages: int = 40,
        window_tokens: int | None = 4,
        stride_pages: int = 1,
        windows: tuple[int, ...] = (WINDOW_TOKENS,),
        has_slow_saves: bool = False,
        failing: float = 0.0,
        num_drafts: int = 0,
        stored: dict[str, bytes] | None = None,
        block_pages: int = 0,
    ) -> None:
        self.block_pages = block_pages  # 0: running requests do not use the store
        self.most_stored = 0
        self.chance, self._failing, self._has_slow_saves = chance, failing, has_slow_saves
        self.num_drafts, self.num_accepted = num_drafts, 0
        self.max_steps = 2 if window_tokens is None and not num_drafts else 1
        self.num_ahead = 0  # steps that were sent while another one ran
        self.layout = KVLayout(
            layers=(FULL_SPEC, *(replace(WINDOW_SPEC, window_tokens=tokens) for tokens in windows), FULL_SPEC),
            dtype=DType.FLOAT32,
        )
        self.groups = layer_groups(self.layout)
        self.device_pages = tuple(device_pages if group.kind is GroupKind.FULL else 24 for group in self.groups)
        self.host_pages = tuple(host_pages if group.kind is GroupKind.FULL else 12 for group in self.groups)
        self.slack_tokens = 2 * stride_pages * PAGE
        self.stored: dict[str, bytes] = {} if stored is None else stored
        self.crashed: list[BaseException] = []
        self.from_ranks: deque[tuple[int, object]] = deque()
        self.jobs: dict[str, Job] = {}
        self.steps: deque[RunDecodeStep] = deque()  # in flight, the oldest first
        self.num_steps = 0
        self.stalled: set[tuple[str, int]] = set()  # requests and positions of steps that had to wait
        self.num_sleeps = 0  # there was no step to be made, although somebody runs
        self.sent: list[object] = []
        self.context = tier_context(
            self.groups,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            page_size=PAGE,
            window_tokens=window_tokens,
            stride_pages=stride_pages,
            low_water=0.6,
            slack_tokens=self.slack_tokens + max(1, num_drafts),
            num_ranks=NUM_RANKS,
            broadcast=self._broadcast,
            stores=StoreRules(block_pages=block_pages, host_pages=host_pages) if block_pages else None,
        )
        self.metrics, self.admission = self.context.metrics, self.context.admission
        self.tier, self.rank_jobs = self.context.tier, self.context.jobs
        store = StoreLeader(
            self.context,
            client=self.store(),  # type: ignore[arg-type]
            keys_of=lambda group, page_hash: [self._key(group, page_hash, rank) for rank in range(NUM_RANKS)],
            settings=StoreSettings(fetch_timeout_s=60.0, refresh_s=60.0, job_bytes=64, page_bytes=(16,) * len(self.groups)),
        )
        self.leader = OffloadLeader(
            self.context,
            slack_pages=self.slack_tokens // PAGE,
            seed_of=lambda salt, prefill: chain_seed(FINGERPRINT, "", salt),
            store=store,
        )
        self.loaded: list[str] = []
        self.leader.listen(on_loaded=self.loaded.append, on_room=self._send_step, on_lost=self._lose)
        self.ranks = [RankWorld(self, rank) for rank in range(NUM_RANKS)]
        self.looking: dict[str, asyncio.Task[Prompt]] = {}

    def store(self) -> MemoryStore:
        return MemoryStore(self.stored, self.chance, self._failing)

    def _key(self, group: int, page_hash: bytes, rank: int) -> str:
        shard = Shard(tp_size=NUM_RANKS, tp_rank=rank, page_size=PAGE)
        return store_key(FINGERPRINT, page_hash, group=self.groups[group], layout=self.layout, shard=shard)

    def _broadcast(self, message: object) -> None:
        self.sent.append(message)
        for rank in self.ranks:
            rank.inbox.append(message)

    # Moves; each is one that can be made now

    def submit(self, prompt: list[int], max_new: int, salt: str = "", *, last_new: int | None = None) -> Job | None:
        if self.leader.refusal(len(prompt) + max_new) is not None:
            return None
        if last_new is None:
            last_new = self.chance.randint(1, max_new) if self.max_steps > 1 else max_new
        job = Job(
            request_id=f"r{len(self.jobs)}", prompt=prompt, max_new=max_new, salt=salt, last_new=last_new, tokens=list(prompt)
        )
        self.jobs[job.request_id] = job
        self.looking[job.request_id] = asyncio.ensure_future(self.leader.look_up(prompt, salt, prefill=PREFILL, may_skip=True))
        return job

    def moves(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for rank in self.ranks:
            if rank.inbox:
                found += [lambda rank=rank: rank.worker.on_message(rank.inbox.popleft())]  # type: ignore[misc]
            for thread in rank.threads:
                is_slow = self._has_slow_saves and thread is rank.save_thread
                if thread.work and not (is_slow and self.chance.random() < 0.97):
                    found.append(thread.run)
            if rank.receiver.draining:
                found.append(lambda rank=rank: rank.worker.incoming.on_drained(rank.receiver.draining.pop()))  # type: ignore[misc]
        if self.from_ranks:
            found += [self._hear, self._hear]
        for job in self.jobs.values():
            task = self.looking.get(job.request_id)
            if not job.is_placed and not job.is_over and task is not None and task.done():
                found.append(lambda job=job: self.place(job))  # type: ignore[misc]
            for number in sorted(job.receiving):
                rank = self.ranks[number]
                is_arriving = job.arriving[number] and job.request_id in rank.receiver.receiving
                if is_arriving and rank.next_chunk(job) is not None:
                    found.append(lambda job=job, number=number: self.ranks[number].arrive(job))  # type: ignore[misc]
            is_here = job.is_placed and not job.receiving and not self.leader.is_loading(job.request_id)
            if is_here and not job.is_running and not job.is_over:
                found.append(lambda job=job: self._begin(job))  # type: ignore[misc]
        return found

    def place(self, job: Job) -> None:
        known = self.looking[job.request_id].result()
        place = self.leader.place(
            PlaceRequest(
                request_id=job.request_id,
                prompt=known,
                max_new_tokens=job.max_new,
                chunk_tokens=CHUNK,
                may_skip=self.chance.random() < 0.9,
                accepted_s=float(job.request_id[1:]),  # its number
            )
        )
        if place is None:
            return
        job.is_placed, job.start_token, job.is_followed = True, place.start_token, place.num_stored > 0
        job.holding = set(range(NUM_RANKS))
        job.receiving = set(range(NUM_RANKS))
        chunks = split_into_chunks(
            PLAN, num_tokens=len(job.prompt), num_layers=self.layout.num_layers, start_token=place.start_token
        )
        for number in range(NUM_RANKS):
            job.arriving[number] = self.chance.sample(list(chunks), len(chunks))
        self._broadcast(
            ExpectRequest(
                transfer_id=job.request_id,
                prefill_incarnation=PREFILL_LIFE,
                num_tokens=len(job.prompt),
                start_token=place.start_token,
                pages=place.pages.by_group,
                host_pages=place.host_pages,
                num_stored=place.num_stored,
                plan=PLAN,
                sampling=SamplingParams(),
            )
        )
        self.leader.begin_loading(job.request_id)

    def _begin(self, job: Job) -> None:
        job.is_running = True
        self.leader.begin(job.request_id)
        self._take(job, job.prompt[-1])
        self._send_step()

    def _take(self, job: Job, token: int) -> None:
        job.tokens.append(token)
        if job.num_generated >= job.last_new:
            self.leader.finish(job.request_id)
            self._broadcast(FinishRequest(request_id=job.request_id))
            job.is_running, job.is_over = False, True

    def _send_step(self) -> None:
        """When the decode leader does it, and never else: anyone who missed a step has the next one by a wake-up alone."""
        while len(self.steps) < self.max_steps and (parts := self._next_parts()):
            self.num_steps += 1
            self.num_ahead += len(self.steps)
            self.steps.append(RunDecodeStep(step=self.num_steps, parts=parts))
            self._broadcast(self.steps[-1])

    def _next_parts(self) -> tuple[DecodeStepPart, ...]:
        in_flight = {part.request_id for step in self.steps for part in step.parts}
        unread = {job.request_id: int(job.request_id in in_flight) for job in self.jobs.values()}
        running = [
            job for job in self.jobs.values() if job.is_running and job.num_generated + unread[job.request_id] < job.max_new
        ]
        parts = tuple(
            DecodeStepPart(
                request_id=job.request_id,
                token_id=None if unread[job.request_id] else job.tokens[-1],
                position=job.position + unread[job.request_id],
                draft_token_ids=self._draft_tokens(job),
            )
            for job in running
            if self.leader.may_step(job.request_id, job.position + unread[job.request_id])
        )
        going = {part.request_id for part in parts}
        self.stalled |= {
            (job.request_id, job.position + unread[job.request_id]) for job in running if job.request_id not in going
        }
        self.num_sleeps += bool(running) and not parts
        return parts

    def _draft_tokens(self, job: Job) -> tuple[int, ...]:
        """Right ones up to a random place."""
        if not self.num_drafts:
            return ()
        most = self.leader.draft_room(job.request_id, job.position, min(self.num_drafts, job.max_new - job.num_generated - 1))
        found, token = list[int](), job.tokens[-1]
        for position in range(job.position, job.position + most):
            token = (next_token(token, position) + (self.chance.random() < 0.2)) % 50
            found.append(token)
        return tuple(found)

    def give_up(self, job: Job) -> None:
        if job.is_over:
            return
        job.is_over, job.is_running = True, False
        self.leader.give_up(job.request_id)
        if job.is_placed:
            self._broadcast(CancelIncoming(transfer_id=job.request_id, reason="gone"))

    def _lose(self, request_id: str, reason: str) -> None:
        """The store has not taken its KV."""
        assert self._failing, reason
        self.jobs[request_id].is_lost = True
        self.give_up(self.jobs[request_id])

    def damage(self, job: Job) -> None:
        """A step says that its KV is no good. Nor is that of all who may share pages with it, in every tier."""
        if not job.is_running:
            return
        known = self.looking[job.request_id].result()
        for other in self.jobs.values():
            if other.holding and self._hashes(other)[:1] == self._hashes(job)[:1] != []:
                self._spoil(other)
        self.leader.damaged(known)
        for entry, page_hash in enumerate(self._hashes(job)):
            assert self.context.on_device.source_of(page_hash, entry) is None
            assert not any(self.tier.find(group, page_hash) for group in range(len(self.groups)))
        self.give_up(job)

    def _hashes(self, job: Job) -> list[bytes]:
        chain = self.looking[job.request_id].result().chain
        assert chain is not None
        return list(chain.hashes)

    def _spoil(self, job: Job) -> None:
        job.is_damaged = True
        for rank in self.ranks:
            rank.spoil(job.request_id)
        for group in range(len(self.groups)):
            for page_hash in self._hashes(job):
                page = self.tier.find(group, page_hash)
                for rank in self.ranks:
                    if page is not None:
                        rank.spoil_host(group, page.number)
                    key = self._key(group, page_hash, rank.rank)
                    if key in self.stored:
                        self.stored[key] = NO_GOOD * (len(self.stored[key]) // len(NO_GOOD))  # as who stores it just now

    def _hear(self) -> None:
        if not self.from_ranks:
            return
        rank, message = self.from_ranks.popleft()
        match message:
            case JobDone():
                self.rank_jobs.done(rank, message.job, message.failed)
            case StepDone():
                for part in self.steps.popleft().parts:
                    newest = self.jobs[part.request_id].tokens[-1] if part.token_id is None else part.token_id
                    for token in (newest, *message.accepted.get(part.request_id, ())):
                        self.leader.computed(part.request_id, token)
                for name, token in message.tokens.items():
                    if self.jobs[name].is_running:
                        self.num_accepted += len(message.accepted.get(name, ()))
                        for one in (*message.accepted.get(name, ()), token):
                            self._take(self.jobs[name], one)
                self.leader.step_over()
                self._send_step()
            case TransferWhole():
                self.jobs[message.transfer_id].receiving.discard(rank)
            case PagesReleased():
                job = self.jobs[message.transfer_id]
                job.holding.discard(rank)
                if not job.holding:
                    self.leader.gone(job.request_id)
            case TransferExpected():
                assert not message.reason
            case StoredKVLost():
                self._lose(message.request_id, message.reason)
            case _:
                raise AssertionError(message)

    def shown(self) -> str:
        """What is not over, for a failed assertion."""
        unfinished = {name: job for name, job in self.jobs.items() if not job.is_over or job.holding}
        counts = [self.tier.counts(index) for index in range(len(self.groups))]
        return f"{self.admission.free_pages} {counts} {len(self.rank_jobs)} {self.admission.wanted} {self.steps} {unfinished}"

    # The end

    async def turn(self) -> bool:
        """Make one move at random; False when there is none."""
        await asyncio.sleep(0)
        moves = self.moves()
        if not moves:
            return self._has_slow_saves and any(thread.work for rank in self.ranks for thread in rank.threads)
        self.chance.choice(moves)()
        if self.crashed:
            raise self.crashed[0]
        self.tier.check_invariants()
        return True

    async def drain(self) -> None:
        """Go on until everything is over; nothing may be left then."""
        idle = 0
        while idle < 20:
            idle = 0 if await self.turn() and not self._only_waits() else idle + 1
        for job in self.jobs.values():
            assert job.is_over and not job.holding, (job.request_id, job.is_placed, job.is_running, job.num_generated)
        assert not len(self.rank_jobs)
        self.tier.check_invariants()
        self.tier.check_idle()
        self.leader.check_idle()
        assert not self.context.short
        for rank in self.ranks:
            rank.allocator.check_invariants()
            assert rank.worker.check_idle()
        assert self.admission.free_pages == PageCounts(self.device_pages)
        assert not self.admission.num_waiting
        assert not self.context.stored
        assert not [key for key in self.stored if key.endswith(RUNNING_SUFFIX)], "they went with their requests"

    def _only_waits(self) -> bool:
        """Whether nothing can change any more: every move asks again for room."""
        busy = any(rank.inbox or any(thread.work for thread in rank.threads) for rank in self.ranks) or self.from_ranks
        busy = busy or not all(rank.offload.is_idle for rank in self.ranks)
        alive = any(job.is_running or (job.is_placed and not job.is_over) for job in self.jobs.values())
        waiting = any(not job.is_over for job in self.jobs.values())
        return not busy and not alive and not waiting
