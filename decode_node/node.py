"""Run the leader of a decode node: serve DecodeControl, and turn calls into work for prefill nodes and for the ranks."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final

import grpc
import structlog

from decode_node.admission import Admission, page_needs
from decode_node.offload.open import open_tiers
from decode_node.offload.tiers import Tiers
from decode_node.progress import Pace
from decode_node.rank_messages import CODEC, JobDone, StoredKVLost, check_step_fits
from decode_node.requests import DecodeRequests, GenerationObserver, GenerationRequest
from decode_node.text import TextCodec
from node_runtime.daemon import Daemon
from node_runtime.engine_watch import FullPool, OutOfMemoryWatch
from node_runtime.health import Readiness
from node_runtime.leader_service import Leader
from node_runtime.rank_messages import StepDone, StepFailed
from planner.memory_advice import Phase, advice_for
from transfer.config import DecodeNodeConfig
from transfer.connector.attempt import IncomingObserver
from transfer.connector.prefill_nodes import PrefillNodes, show_peers
from transfer.connector.prefill_peer import PrefillPeer
from transfer.connector.prefill_routing import group_of
from transfer.connector.prompt import check_cache_salt, checked_prompt, checked_stop_tokens
from transfer.connector.rank_report import RankReady
from transfer.errors import ConfigError, LocalProtocolError, PeerUnreachable, ResourceExhausted, TransferAborted, TransferError
from transfer.instance import Instance
from transfer.layer_groups import PageCounts, layer_groups
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.refusals import without_request
from transfer.registry.convert import sampling_from_proto
from transfer.registry.discovery import DiscoveryView, open_discovery
from transfer.registry.status import end_with
from transfer.storage.client import StoreClient
from transfer.storage.open import open_store_client
from transfer.tracing import Span, traceparent_in
from transfer.transfer_ids import check_request_id

log = structlog.get_logger(__name__)

CLIENT_WENT_AWAY: Final = "the client went away"

READ_S: Final = 10.0
"""Longest wait of a drain for a client that does not read the end of its answer."""


class _Life:
    """State of the leader that exists as long as its ranks."""

    def __init__(self, node: DecodeNode, hellos: tuple[RankReady, ...], address: str, store: StoreClient | None = None) -> None:
        config, first = node.config, hellos[0]
        self.instance: Instance = first.instance
        self.memory = tuple(hello.memory for hello in hellos)
        self.max_context_tokens = first.max_context_tokens
        self.vocab_size = first.vocab_size
        self.eos_token_ids = frozenset(first.eos_token_ids)
        self.generation: DecodeRequests
        self._group_size = config.placement.group_size
        self._address = address
        self.peers = PrefillNodes(
            self._group(node.discovery.addresses),
            config=config,
            hellos=hellos,
            security=node.security,
            decode_address=address,
            metrics=node.metrics,
            broadcast=node.broadcast,
            on_lost=lambda peer, reason: self.requests.on_peer_lost(peer, reason),
            on_change=lambda: self._on_peers_changed(node),
            view=(lambda: node.discovery.view) if config.discovery.finds_nodes else None,
            prefix_tokens=config.prefix_tokens,
        )
        page_size = first.instance.shard.page_size
        admission = Admission(
            pool_pages=PageCounts(first.pool_pages),
            needs=page_needs(layer_groups(first.instance.layout), page_size, slack_tokens=config.window_slack_tokens),
            max_running=config.limits.max_running_requests,
            on_freed=lambda: self.requests.room_changed(),
        )
        self.memory_watch = OutOfMemoryWatch(on_step=node.metrics.counter("out_of_memory_steps").inc, on_hopeless=node.lose)
        self.full_pool = FullPool(
            advice=advice_for(Phase.FULL_POOL, config, plan=first.memory.plan),
            on_change=node.metrics.gauge("requests_waiting_for_pages").set,
        )

        def on_no_room(transfer_id: str) -> None:
            if admission.num_running < config.limits.max_running_requests:  # otherwise it waits for a slot, not for pages
                self.full_pool.waits(transfer_id)

        self.tiers = Tiers(admission)
        if config.offload.is_on:
            self.tiers = open_tiers(
                config, hellos, admission=admission, broadcast=node.broadcast, metrics=node.metrics, client=store
            )
        self.generation = DecodeRequests(
            tiers=self.tiers,
            peers=self.peers,
            text=node.text,
            own=first.instance,
            limits=config.limits,
            speculative=config.speculative,
            broadcast=node.broadcast,
            on_broken=node.lose,
            observer=IncomingObserver(
                on_outcome=node.metrics.request_ended,
                on_queue_seconds=node.metrics.histogram("queue_seconds").observe,
                on_retry=node.metrics.counter("retries").inc,
                on_given_up=node.metrics.request_given_up,
                on_no_room=on_no_room,
                on_wait_over=self.full_pool.waits_no_more,
            ),
            generation=GenerationObserver(
                on_first_token=node.metrics.histogram("time_to_first_token_seconds").observe,
                on_token=node.metrics.histogram("time_per_output_token_seconds").observe,
                on_drafts=node.metrics.draft_tokens,
            ),
            can_overlap=all(hello.can_overlap for hello in hellos),
        )
        self.requests = self.generation.transfers

    def _on_peers_changed(self, node: DecodeNode) -> None:
        self.requests.peers_changed()
        node.readiness_changed()

    def use(self, addresses: Iterable[str]) -> None:
        """Take the present addresses of the prefill nodes."""
        self.peers.use(self._group(addresses))

    def _group(self, addresses: Iterable[str]) -> list[str]:
        """Return the nodes to join. Leave out this node: nodes that change their roles may all have the same list or name."""
        others = [address for address in addresses if address != self._address]
        return group_of(others, chooser=self._address, size=self._group_size)


class DecodeNode(Leader[DecodeNodeConfig, _Life], pb_grpc.DecodeControlServicer):
    """A `node_runtime.daemon.RoleServer` and the servicer of its API."""

    def __init__(self, daemon: Daemon, config: DecodeNodeConfig) -> None:
        """Raise ConfigError if a step of that configuration can be larger than a message to the ranks."""
        check_step_fits(config)
        super().__init__(daemon, config, codec=CODEC, on_rank_message=self._on_rank_message)
        # Of the node, because every life of its ranks uses the results.
        self.discovery = open_discovery(config.discovery, config.peers.prefill_nodes, self.security)
        self.text = TextCodec(config.model)
        self._in_flight: dict[str, GenerationRequest] = {}  # by the ids of clients whose calls have not ended
        self._num_coming = 0  # accepted calls that are not in the queue yet
        self._tokenising: set[asyncio.Future[tuple[int, ...]]] = set()

    # Role

    async def open(self) -> str:
        return await self._listen(decode_control=self)

    def start_discovery(self, address: str) -> None:
        self.discovery.start()

    async def begin_life(self, hellos: tuple[RankReady, ...]) -> None:
        store = None
        if self.config.offload.is_on:
            # On a thread, because the first object store loads its library.
            store = await asyncio.to_thread(
                open_store_client, self.config.storage, loop=asyncio.get_running_loop(), observer=self.metrics.store
            )
        self._life = _Life(self, hellos, self._address, store)
        self._life.peers.start()
        self.discovery.listen(self._life.use)
        await self._set_serving(True)

    async def end_life(self, error: TransferError) -> None:
        life, self._life = self._life, None
        await self._set_serving(False)
        if life is not None:
            self.discovery.unlisten(life.use)
            await life.generation.close(error)
            life.full_pool.close()
            await life.peers.close()
            await life.tiers.close()

    async def close(self) -> None:
        await self.discovery.close()
        await super().close()

    def readiness(self) -> Readiness:
        if self._draining.is_on:
            return Readiness(is_ready=False, reason="the node is draining")
        life = self._life
        if life is None or life.peers.pick() is None:
            return Readiness(is_ready=False, reason="no ranks" if life is None else life.peers.unavailable_reason())
        return Readiness(is_ready=True)

    def show(self) -> Mapping[str, int]:
        if self._life is not None:
            self._life.tiers.show()
        return show_peers(self.peers, self.metrics)

    @property
    def num_in_flight(self) -> int:
        """Requests in flight, those being tokenised, and for `READ_S` those whose client has not read all tokens."""
        oldest_s = time.monotonic() - READ_S
        num_unread = sum(not request.is_told or request.told_s > oldest_s for request in self._in_flight.values())
        return max(self._num_coming + super().num_in_flight, num_unread)

    # Ranks

    def _on_rank_message(self, rank: int, message: Any) -> None:
        life = self._life
        if life is None:
            return
        match message:
            case StepDone():
                life.memory_watch.step_done()
                life.generation.on_step_done(message)
            case StepFailed():
                if message.is_out_of_memory:
                    life.memory_watch.step_failed(f"rank {rank}: {message.reason}")
                if message.is_fatal:
                    # Often another rank has died. The requests end with the life, not because of an error of their own.
                    life.generation.on_engine_lost()
                    self.lose(f"rank {rank}: {message.reason}")
                else:
                    life.generation.on_step_failed(message)
            case JobDone():
                life.tiers.job_done(rank, message)
            case StoredKVLost():
                life.generation.on_kv_lost(message.request_id, f"rank {rank}: {message.reason}")
            case _ if not life.requests.on_message(rank, message):
                raise LocalProtocolError(f"a decode leader cannot serve {type(message).__name__}")

    # DecodeControl

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateEvent]:
        life = await self._life_for_request(context)
        span = None
        if self.tracer is not None:
            told = traceparent_in(context.invocation_metadata())
            span = self.tracer.begin("kvferry.generate", parent=told, attributes={"max_new_tokens": request.max_new_tokens})
        self._num_coming += 1
        try:
            accepted, request_id = await self._submit(life, request, span)
        except TransferError as error:
            self._count_refused(error)
            if span is not None:
                span.end(without_request(error))
            await end_with(context, error)
        except asyncio.CancelledError:  # while its text was tokenised, so no request reports it
            gone = TransferAborted(CLIENT_WENT_AWAY)
            self.metrics.request_ended("aborted")
            self.metrics.request_given_up(gone)
            if span is not None:
                span.end(str(gone))
            raise
        finally:
            self._num_coming -= 1
        prompt_tokens = len(accepted.token_ids)
        self.metrics.counter("prompt_tokens").inc(prompt_tokens)
        try:
            yield pb.GenerateEvent(accepted=pb.GenerateAccepted(request_id=request_id, prompt_tokens=prompt_tokens))
            pace = Pace()
            while True:
                await pace.wait(life.generation.num_generating)
                match await accepted.progress.get():
                    case pb.GeneratedTokens() as tokens:
                        self.metrics.counter("generated_tokens").inc(len(tokens.token_ids))
                        yield pb.GenerateEvent(tokens=tokens)
                        pace.sent(len(tokens.token_ids))
                    case pb.GenerateDone() as done:
                        yield pb.GenerateEvent(done=done)
                        return
                    case TransferError() as failure:
                        await end_with(context, failure)
        finally:
            self._in_flight.pop(request_id, None)
            life.requests.give_up(accepted, TransferAborted(CLIENT_WENT_AWAY))
            if span is not None:
                span.end()  # no effect if the failure has ended it

    async def _submit(self, life: _Life, request: pb.GenerateRequest, span: Span | None = None) -> tuple[GenerationRequest, str]:
        """Check and queue a request. Return it with its client's id."""
        request_id = request.request_id or secrets.token_hex(8)
        check_request_id(request_id)
        check_cache_salt(request.cache_salt)
        given: Sequence[int]
        match request.WhichOneof("input"):
            case "prompt":
                if not request.prompt:  # the tokenizer may add a token that begins every text
                    raise ConfigError("prompt is empty; it must have at least one character")
                given = await self._tokenise(request.prompt, max_tokens=life.max_context_tokens)
            case "token_ids":
                given = request.token_ids.ids
            case _:
                raise ConfigError("prompt is missing; give either prompt or token_ids")
        token_ids = checked_prompt(given, max_context_tokens=life.max_context_tokens, vocab_size=life.vocab_size)
        room = life.max_context_tokens - len(token_ids)
        if not 1 <= request.max_new_tokens <= room:
            raise ConfigError(
                f"max_new_tokens is {request.max_new_tokens}; after a prompt of {len(token_ids)} tokens it must be in [1, {room}]"
            )
        end_ids = checked_stop_tokens(request.stop_token_ids, vocab_size=life.vocab_size)
        if not request.ignore_eos:
            end_ids |= life.eos_token_ids
        sampling = sampling_from_proto(request.sampling)
        # Check now, because a long text was tokenised meanwhile.
        if life is not self._life:
            raise PeerUnreachable("the decode ranks have died")
        if request_id in self._in_flight:
            raise TransferAborted(f"request_id {request_id} is in flight already; ids must be unique")
        accepted = life.generation.submit(
            request_id,
            token_ids,
            request.max_new_tokens,
            sampling,
            end_ids,
            cache_salt=request.cache_salt,
            span=span,
            may_wait=not self._draining.is_on,
        )
        self._in_flight[request_id] = accepted
        return accepted, request_id

    async def _tokenise(self, text: str, *, max_tokens: int) -> tuple[int, ...]:
        """Tokenise as `TextCodec.encode` does, with a bound on waiting texts, each of which can be as long as a message.

        Raises:
            ResourceExhausted: As many texts wait as requests may be queued.
        """
        most = self.config.limits.max_queued_requests
        if len(self._tokenising) >= most:
            raise ResourceExhausted(
                f"{most} prompts wait to be tokenised, as many as requests may wait (limits.max_queued_requests)"
            )
        work = asyncio.ensure_future(self.text.encode(text, max_tokens=max_tokens))
        self._tokenising.add(work)
        work.add_done_callback(self._tokenising.discard)
        # It continues without its caller, because a thread that has begun cannot be stopped.
        return await asyncio.shield(work)

    async def Reserve(self, request: pb.ReserveRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ReserveResponse:
        life = await self._life_or_end(context, is_new_work=False)
        try:
            return await life.requests.answer(request)
        except TransferError as error:
            await end_with(context, error)

    # As operators see it

    @property
    def peers(self) -> Sequence[PrefillPeer]:
        return () if self._life is None else self._life.peers.peers

    @property
    def discovery_view(self) -> DiscoveryView:
        return self.discovery.view
