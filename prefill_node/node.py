"""The leader of a prefill node: serve PrefillControl, and turn calls into work for the ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from typing import Any

import grpc

from node_runtime.daemon import Daemon
from node_runtime.engine_watch import FullPool, OutOfMemoryWatch
from node_runtime.health import Readiness
from node_runtime.leader_service import Leader
from node_runtime.rank_messages import StepDone, StepFailed
from planner.memory_advice import Phase, advice_for
from prefill_node.prefix_loads import PrefixLoads
from prefill_node.rank_messages import CODEC, PrefixLoaded, check_step_fits
from prefill_node.requests import OnLoaded, OnTaskOver, PrefillRequests
from prefill_node.scheduler import PrefillScheduler, page_needs
from transfer.config import PrefillNodeConfig
from transfer.connector.decode_instances import Join, show_joins
from transfer.connector.messages import PagesReleased
from transfer.connector.prefill_calls import PrefillCalls
from transfer.connector.rank_report import RankReady
from transfer.connector.reserve_client import ReserveClient
from transfer.errors import LocalProtocolError, TransferError
from transfer.instance import Instance
from transfer.layer_groups import PageCounts, layer_groups
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.discovery import DiscoveryView, open_registration
from transfer.storage.open import open_store_client


class _Life:
    """The state that exists only while the ranks live."""

    def __init__(self, node: PrefillNode, hellos: tuple[RankReady, ...]) -> None:
        config, first = node.config, hellos[0]
        self.instance: Instance = first.instance
        self.memory = tuple(hello.memory for hello in hellos)
        self.memory_watch = OutOfMemoryWatch(on_step=node.metrics.counter("out_of_memory_steps").inc, on_hopeless=node.lose)
        self.full_pool = FullPool(
            advice=advice_for(Phase.FULL_POOL, config, plan=first.memory.plan),
            on_change=node.metrics.gauge("requests_waiting_for_pages").set,
        )
        self.requests = PrefillRequests(
            PrefillScheduler(
                pool_pages=PageCounts(first.pool_pages),
                needs=page_needs(
                    layer_groups(first.instance.layout),
                    first.instance.shard.page_size,
                    chunk_tokens=config.chunk.chunk_tokens,
                ),
                chunk_tokens=config.chunk.chunk_tokens,
                max_step_tokens=config.limits.max_step_tokens,
                max_running=config.limits.max_running_requests,
                host_pages=min((hello.host_pages[0] for hello in hellos if hello.host_pages), default=0),
            ),
            num_ranks=len(hellos),
            limits=config.limits,
            broadcast=node.broadcast,
            reserve=partial(node.reserving.reserve, prefill_incarnation=first.instance.incarnation),
            on_broken=node.lose,
            on_outcome=node.metrics.request_ended,
            on_given_up=node.metrics.request_given_up,
            on_short=self.full_pool.changed,
            loads=partial(self._loads, node) if config.storage.is_set else None,
        )
        self.calls = PrefillCalls(
            hello=first,
            num_ranks=len(hellos),
            config=config,
            security=node.security,
            draining=node.draining,
            broadcast=node.broadcast,
            requests=self.requests,
            reserve_client=node.reserving,
            metrics=node.metrics,
            tracer=node.tracer,
        )
        self.joins = self.calls.joins

    def _loads(self, node: PrefillNode, on_loaded: OnLoaded, on_task_over: OnTaskOver) -> PrefixLoads:
        storage = node.config.storage
        client = open_store_client(storage, loop=asyncio.get_running_loop(), observer=node.metrics.store)
        assert client is not None, "called only if a store is set"

        def loaded(request_id: str, num_tokens: int) -> None:
            node.metrics.counter("loaded_prompt_tokens").inc(num_tokens)
            on_loaded(request_id, num_tokens)

        return PrefixLoads(
            client,
            own=self.instance,
            store_salt=storage.salt,
            timeout_s=storage.get_timeout_s,
            broadcast=node.broadcast,
            on_loaded=loaded,
            on_task_over=on_task_over,
        )


class PrefillNode(Leader[PrefillNodeConfig, _Life], pb_grpc.PrefillControlServicer):
    """A `node_runtime.daemon.RoleServer` and the servicer of its API."""

    def __init__(self, daemon: Daemon, config: PrefillNodeConfig) -> None:
        """Raise ConfigError if a step can be larger than a message to the ranks."""
        check_step_fits(config)
        super().__init__(daemon, config, codec=CODEC, on_rank_message=self._on_rank_message)
        self.registration = open_registration(config.discovery)
        self.reserving = ReserveClient(self.security)

    # Role

    async def open(self) -> str:
        return await self._listen(prefill_control=self)

    def start_discovery(self, address: str) -> None:
        if self.registration is not None:
            self.registration.start(address)

    async def begin_life(self, hellos: tuple[RankReady, ...]) -> None:
        self._life = _Life(self, hellos)
        self._life.requests.start()
        await self._set_serving(True)

    def announce(self, is_serving: bool) -> None:
        """Keep the node's entry in discovery exactly while the node accepts requests."""
        if self.registration is not None:
            self.registration.want(is_serving)

    async def end_life(self, error: TransferError) -> None:
        life, self._life = self._life, None
        await self._set_serving(False)
        if life is not None:
            await life.requests.close(error)
            life.full_pool.close()
            life.joins.forget_all(error)
        await self.reserving.close()

    def readiness(self) -> Readiness:
        return Readiness(is_ready=not self._draining.is_on, reason="the node is draining")

    def show(self) -> Mapping[str, int]:
        return show_joins(self.peers, self.metrics)

    async def close(self) -> None:
        if self.registration is not None:
            await self.registration.close()
        await self.reserving.close()
        await super().close()

    # Ranks

    def _on_rank_message(self, rank: int, message: Any) -> None:
        life = self._life
        if life is None:
            return
        match message:
            case StepDone():
                life.memory_watch.step_done()
                life.requests.on_step_done(rank, message)
            case PrefixLoaded():
                life.requests.on_prefix_loaded(rank, message)
            case StepFailed():
                if message.is_out_of_memory:
                    life.memory_watch.step_failed(f"rank {rank}: {message.reason}")
                if message.is_fatal:
                    # Often another rank has died. The requests end with the life, not with this failure.
                    self.lose(f"rank {rank}: {message.reason}")
                else:
                    life.requests.on_step_failed(message)
            case PagesReleased():
                life.requests.on_pages_released(rank, message.transfer_id)
            case _ if not life.calls.on_rank_message(rank, message):
                raise LocalProtocolError(f"a prefill leader cannot serve {type(message).__name__}")

    # Implementation of `NodeService` and `Side`

    @property
    def peers(self) -> Iterable[Join]:
        return () if self._life is None else self._life.joins

    @property
    def discovery_view(self) -> DiscoveryView | None:
        return None if self.registration is None else self.registration.view

    # PrefillControl

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[pb.JoinEvent]:
        life = await self._life_or_end(context, is_new_work=True)
        async with contextlib.aclosing(life.joins.serve(request, context)) as events:
            async for event in events:
                yield event

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        life = await self._life_for_request(context)
        async with contextlib.aclosing(life.calls.prefill(request, context)) as events:
            async for event in events:
                yield event

    async def PrefillIntoRoom(
        self, request_iterator: AsyncIterator[pb.PrefillMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        life = await self._life_for_request(context)
        async with contextlib.aclosing(life.calls.prefill_into_room(request_iterator, context)) as events:
            async for event in events:
                yield event

    async def StreamPrompts(
        self, request_iterator: AsyncIterator[pb.PromptMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PromptEvent]:
        life = await self._life_for_request(context)
        async with contextlib.aclosing(life.calls.stream_prompts(request_iterator, context)) as events:
            async for event in events:
                yield event
