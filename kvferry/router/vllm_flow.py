"""The two-step flow of vLLM servers: prefill computes the prompt, decode takes its KV and generates.

A request is a list of attempts, each with a pair of servers and a `transfer_id` of its own. An attempt can be followed by another
one until the first token has gone to the client. How the pair is asked:

- *sequential*: decode once prefill has answered, with the `kv_transfer_params` of that answer. Any connector will do.
- *concurrent*: both at once, decode with what prefill's answer would say. For that the router must know where the KV of that
  prefill server is to be had, and it learns it from the server's answers: the first request goes there sequentially, and so does
  the first after a failure (docs/adr/0025-concurrent-prefill-and-decode.md).

Where the prefill side is kvferry's own nodes, only decode is asked, and told which of them is to compute the prompt: kvferry's
connector has it do so.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import structlog

from kvferry.router.api import ApiError, Call, Head
from kvferry.router.attempts import Attempts
from kvferry.router.body_reader import BodyReader
from kvferry.router.decode import DecodeAnswer, open_decode
from kvferry.router.http_server import HttpServer
from kvferry.router.metrics import RouterMetrics
from kvferry.router.openai_body import VllmBody, vllm_body
from kvferry.router.prefill import MOST_DOUBT, PassedOn, Prefilled, doubt, forget, run_prefill, trust
from kvferry.router.servers import Lease, Server, ServerFailed, Tier, compare_names
from kvferry.router.settings import FlowKind, RouterSettings
from node_runtime.health import Readiness

if TYPE_CHECKING:
    from kvferry.router.node_server import NodeServer
    from transfer.registry.security import Security

log = structlog.get_logger(__name__)

PREFILL_GRACE_S: Final = 10.0
"""How long a prefill request may take to end by itself once decode has all the KV: its answer is milliseconds behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """The places of one attempt; without a server and a node before it decode computes the prompt."""

    prefill: Lease[HttpServer] | None
    node: Lease[NodeServer] | None
    decode: Lease[HttpServer]


class VllmFlow:
    """A `kvferry.router.api.Backend`. Opened on the loop that uses it.

    Args:
        security: How prefill nodes are called; None: there are none.
    """

    def __init__(self, settings: RouterSettings, security: Security | None, metrics: RouterMetrics) -> None:
        def servers(tier: str, urls: tuple[str, ...]) -> Tier[HttpServer]:
            return Tier(
                [
                    HttpServer(
                        url,
                        tier,
                        connect_timeout_s=settings.connect_timeout_s,
                        lost_after_s=settings.lost_after_s,
                        on_opened=metrics.breaker_opened,
                    )
                    for url in urls
                ]
            )

        self._settings = settings
        self._metrics = metrics
        self.prefill = servers("prefill", () if settings.are_prefill_nodes else settings.prefill)
        self.nodes: Tier[NodeServer] = Tier([])
        if settings.are_prefill_nodes:
            assert security is not None
            self.nodes = Tier(_nodes(settings, security, metrics))
        self.decode = servers("decode", settings.decode)
        self._reader = BodyReader()
        self._ending: set[asyncio.Task[Any]] = set()  # prefill requests whose attempt is over

    @property
    def _servers(self) -> tuple[HttpServer | NodeServer, ...]:
        return *self.decode.servers, *self._before.servers

    @property
    def _before(self) -> Tier[HttpServer] | Tier[NodeServer]:
        return self.nodes if self._settings.are_prefill_nodes else self.prefill

    async def close(self) -> None:
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self._servers))

    # Health

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(self._watch(server))

    async def _watch(self, server: HttpServer | NodeServer) -> None:
        while True:
            try:
                await server.check()
            except ServerFailed as failure:
                server.check_failed(failure.reason)
                if failure.kind == "unreachable" and isinstance(server, HttpServer):
                    forget(server)
            else:
                server.check_succeeded()
                compare_names(self._servers)
            await asyncio.sleep(self._settings.health_interval_s)

    def readiness(self) -> Readiness:
        reason = "; ".join(reason for tier in (self._before, self.decode) if (reason := tier.unavailable_reason()))
        return Readiness(is_ready=not reason, reason=reason)

    def num_servers(self) -> Mapping[tuple[str, str], int]:
        return {**self._before.states(), **self.decode.states()}

    async def models(self, headers: Mapping[str, str]) -> tuple[Head, bytes]:
        misfits = [server.misfit for server in self._before.servers]
        if all(misfits):
            raise ApiError(503, f"no prefill server serves what the decode servers do: {'; '.join(misfits)}", retry_after_s=1)
        server = self.decode.pick()
        assert server is not None  # the first one fits
        try:
            status, content_type, content = await server.get_models(headers)
        except ServerFailed as failure:
            raise ApiError(503, str(failure), retry_after_s=1) from failure
        return Head(status=status, content_type=content_type), content

    # Requests

    async def read(self, path: str, content: bytes) -> VllmBody:
        return await self._reader.read(content, vllm_body, path)

    async def answer(self, call: Call[VllmBody]) -> AsyncGenerator[Head | bytes, None]:
        alone = call.body.alone
        if alone is not None:
            self._metrics.decode_alone(alone)
        attempts = Attempts(self._settings.retries, call, self._metrics)
        while True:
            pair = self._pick(call, attempts.failed, is_alone=alone is not None)
            has_begun = False
            try:
                async with contextlib.aclosing(self._try(call, pair, is_sequential=attempts.is_sequential)) as parts:
                    async for part in parts:
                        has_begun = True
                        yield part
                return
            except ServerFailed as failure:
                if pair.prefill is not None:
                    (doubt if failure.kind == "stale" else forget)(pair.prefill.server)
                self._metrics.server_failed(failure.server.tier, failure.kind)
                if has_begun:
                    raise ApiError(502, f"the answer was cut off: {failure}") from failure
                await attempts.next(failure)

    def _pick(self, call: Call[VllmBody], tried: frozenset[Server], *, is_alone: bool) -> _Pair:
        decode = self.decode.lease(1, tried=tried)
        if decode is None:
            raise ApiError(503, self.decode.unavailable_reason(), retry_after_s=1)
        if is_alone:
            return _Pair(prefill=None, node=None, decode=decode)
        prefill = self.prefill.lease(call.body.prompt_tokens, tried=tried)
        node = self.nodes.lease(call.body.prompt_tokens, tried=tried)
        if prefill is None and node is None:
            decode.end()
            raise ApiError(503, self._before.unavailable_reason(), retry_after_s=1)
        return _Pair(prefill=prefill, node=node, decode=decode)

    async def _try(self, call: Call[VllmBody], pair: _Pair, *, is_sequential: bool) -> AsyncGenerator[Head | bytes, None]:
        """The answer of one pair of servers. Whatever way it ends, nothing that is of no more use goes on at either."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                answer = await self._open(call, pair, stack, is_sequential=is_sequential)
                yield answer.head
                async with contextlib.aclosing(answer.parts()) as parts:
                    async for part in parts:
                        yield part
        except PassedOn as passed:
            yield passed.head
            yield passed.content

    async def _open(
        self, call: Call[VllmBody], pair: _Pair, stack: contextlib.AsyncExitStack, *, is_sequential: bool
    ) -> DecodeAnswer:
        """The answer of the decode server, from its first token on; `stack` ends what runs for it."""
        transfer_id = secrets.token_hex(16)
        stack.callback(pair.decode.end)
        if pair.node is not None:
            stack.callback(pair.node.end)
            self._begin(call, pair, "fetched", transfer_id)
            return await stack.enter_async_context(_decode(call, pair.decode, pair.node.server.params()))
        if pair.prefill is None:
            self._begin(call, pair, "alone", transfer_id)
            return await stack.enter_async_context(_decode(call, pair.decode, None))
        server = pair.prefill.server
        is_known = not is_sequential and self._settings.flow is FlowKind.CONCURRENT and server.doubt < MOST_DOUBT
        source = server.source if is_known else None
        self._begin(call, pair, "sequential" if source is None else "concurrent", transfer_id)
        prefill = run_prefill(call, pair.prefill, transfer_id, is_sequential=source is None, metrics=self._metrics)
        if source is None:
            try:
                prefilled = await prefill
            finally:
                pair.prefill.end()
            return await stack.enter_async_context(_decode(call, pair.decode, prefilled.params))
        prefilling = asyncio.create_task(prefill)
        stack.push_async_exit(self._at_end_of(prefilling, pair.prefill))
        told = source.params(transfer_id)
        opening = asyncio.create_task(stack.enter_async_context(_decode(call, pair.decode, told, is_guess=True)))
        try:
            await asyncio.wait({prefilling, opening}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done() and prefilling.result().source != source:  # the result raises where prefill failed
                raise ServerFailed(server, "stale", f"the KV of its prompts is no longer at {source.address}")
            answer = await opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        trust(server)
        return answer

    def _begin(self, call: Call[VllmBody], pair: _Pair, flow: str, transfer_id: str) -> None:
        self._metrics.attempt_began(flow)
        log.debug(
            "try_began",
            request_id=call.request_id,
            transfer_id=transfer_id,
            flow=flow,
            prefill=next((lease.server.url for lease in (pair.prefill, pair.node) if lease is not None), None),
            decode=pair.decode.server.url,
        )

    def _at_end_of(self, prefilling: asyncio.Task[Prefilled], lease: Lease[HttpServer]) -> _AtExit:
        """What ends a prefill request together with its attempt: at once, unless the attempt went well."""

        def ended(task: asyncio.Task[Prefilled]) -> None:
            self._ending.discard(task)
            lease.end()
            if not task.cancelled() and isinstance(task.exception(), ServerFailed):
                forget(lease.server)

        async def at_exit(kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
            if kind is not None:
                prefilling.cancel()
                await asyncio.gather(prefilling, return_exceptions=True)
            elif not prefilling.done():
                self._ending.add(prefilling)
                asyncio.get_running_loop().call_later(PREFILL_GRACE_S, prefilling.cancel)
            return False

        prefilling.add_done_callback(ended)
        return at_exit


def _nodes(settings: RouterSettings, security: Security, metrics: RouterMetrics) -> list[NodeServer]:
    from kvferry.router.node_server import NodeServer  # brings gRPC

    return [
        NodeServer(address, "prefill", security, lost_after_s=settings.lost_after_s, on_opened=metrics.breaker_opened)
        for address in settings.prefill
    ]


_AtExit = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], Coroutine[Any, Any, bool]]


@contextlib.asynccontextmanager
async def _decode(
    call: Call[VllmBody], lease: Lease[HttpServer], params: Mapping[str, Any] | None, *, is_guess: bool = False
) -> AsyncIterator[DecodeAnswer]:
    """As `open_decode`; the server's breaker is told how it went.

    Args:
        is_guess: `params` come from an earlier answer of the prefill server's. Where decode fails before its first token they may
            have been wrong: the decode server is not blamed, and the failure is "stale".
    """
    is_open = False
    try:
        async with open_decode(call, lease.server, params) as answer:
            is_open = True
            lease.succeeded()
            yield answer
    except ServerFailed as failure:
        if failure.server is not lease.server or failure.kind == "unreachable":  # of that the breaker was told already
            raise
        if is_guess and not is_open and failure.kind == "status":
            raise ServerFailed(failure.server, "stale", failure.reason, status=failure.status) from failure
        lease.failed(failure.reason)
        raise
