"""The servers behind a router, and the attempts of a request there.

An attempt has a decode server, a prefill server where one is to compute the prompt, and a `transfer_id` of its own. Until the
first token is there, another attempt can follow. The kinds of servers differ in how decode learns where the KV is:

- vLLM prefill servers, *sequential*: decode is asked once prefill has answered, with the `kv_transfer_params` of that answer.
  Any connector will do.
- vLLM prefill servers, *concurrent*: both are asked at once, decode with the parameters that prefill's answer would have. The
  router learns the source of the KV from the server's answers: the first request goes there sequentially, and so does the first
  after a failure (docs/adr/0025-concurrent-prefill-and-decode.md).
- kvferry's own prefill nodes, *fetched*: only decode is asked. kvferry's connector has the named node compute the prompt.
- kvferry's own decode nodes, *node*: they find their prefill nodes by themselves.
- *alone*: the decode server computes a prompt that cannot be handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import structlog

from kvferry.router.api import Answer, ApiError, Body, Call
from kvferry.router.body_reader import BodyReader
from kvferry.router.http_server import HttpServer
from kvferry.router.kv_source import KVSource, source_of
from kvferry.router.metrics import RouterMetrics
from kvferry.router.openai_body import vllm_body
from kvferry.router.servers import Lease, Server, ServerFailed, Tier, compare_names
from kvferry.router.settings import FlowKind, RouterSettings
from node_runtime.health import Readiness

if TYPE_CHECKING:
    from kvferry.router.node_model import NodeModel
    from kvferry.router.node_server import NodeServer
    from transfer.registry.security import Security

    AnyServer: TypeAlias = HttpServer | NodeServer

log = structlog.get_logger(__name__)

PREFILL_GRACE_S: Final = 10.0
"""How long a prefill request may take to end by itself once decode has all the KV: its answer is milliseconds behind."""

PAUSE_S: Final = 0.05
"""Before the second attempt, which can go to the same server where there is one alone; twice as long before each that follows."""

MAX_PAUSE_S: Final = 1.0


class Backend:
    """See the module's docstring. Opened on the loop that uses it.

    Args:
        security: How nodes are called; None: there are none.

    Raises:
        ConfigError: The tokenizer cannot be used.
    """

    def __init__(self, settings: RouterSettings, security: Security | None, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._security = security
        self._metrics = metrics
        self._reader = BodyReader()
        self._model: NodeModel | None = None
        if settings.are_nodes:
            from kvferry.router.node_model import NodeModel  # brings gRPC

            self._model = NodeModel(settings)
        self.prefill = Tier([self._server(one, "prefill", is_node=settings.are_prefill_nodes) for one in settings.prefill])
        self.decode = Tier([self._server(one, "decode", is_node=settings.are_nodes) for one in settings.decode])
        self._ending: set[asyncio.Task[Any]] = set()  # prefill requests whose attempt is over

    def _server(self, address: str, tier: str, *, is_node: bool) -> AnyServer:
        health: dict[str, Any] = {"lost_after_s": self._settings.lost_after_s, "on_opened": self._breaker_opened}
        if not is_node:
            return HttpServer(address, tier, connect_timeout_s=self._settings.connect_timeout_s, **health)
        from kvferry.router.node_server import NodeServer  # brings gRPC

        assert self._security is not None
        return NodeServer(address, tier, self._security, self._model, **health)

    def _breaker_opened(self, tier: str) -> None:
        self._metrics("breaker_openings", tier=tier).inc()

    @property
    def _tiers(self) -> tuple[Tier[AnyServer], ...]:
        return (self.prefill, self.decode) if self.prefill.servers else (self.decode,)

    async def close(self) -> None:
        """Close all connections."""
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await asyncio.gather(*(server.close() for tier in self._tiers for server in tier.servers))

    # Health

    async def watch(self) -> None:
        """Check the servers' health, for ever."""
        async with asyncio.TaskGroup() as group:
            for tier in self._tiers:
                for server in tier.servers:
                    group.create_task(self._watch(server))

    async def _watch(self, server: AnyServer) -> None:
        while True:
            try:
                await server.check()
            except ServerFailed as failure:
                server.check_failed(failure.reason)
                if failure.kind == "unreachable" and isinstance(server, HttpServer):
                    server.learnt.failed()
            else:
                server.check_succeeded()
                compare_names((*self.decode.servers, *self.prefill.servers))
            await asyncio.sleep(self._settings.health_interval_s)

    def readiness(self) -> Readiness:
        """Return whether requests can be served now."""
        reason = "; ".join(reason for tier in self._tiers if (reason := tier.unavailable_reason()))
        return Readiness(is_ready=not reason, reason=reason)

    def num_servers(self) -> Mapping[tuple[str, str], int]:
        """Return how many servers there are, by tier and state (`kvferry.router.servers.STATES`)."""
        return {key: number for tier in self._tiers for key, number in tier.states().items()}

    # Requests

    async def models(self, headers: Mapping[str, str]) -> Answer:
        """Return the answer to `/v1/models`.

        Raises:
            ApiError: There is none.
        """
        misfits = [server.misfit for server in self.prefill.servers]
        if misfits and all(misfits):
            raise ApiError(503, f"no prefill server serves what the decode servers do: {'; '.join(misfits)}", retry_after_s=1)
        server = self.decode.pick()
        assert server is not None  # the first one fits
        try:
            return await server.models(headers)
        except ServerFailed as failure:
            raise ApiError(503, str(failure), retry_after_s=1) from failure

    async def read(self, path: str, content: bytes) -> Body:
        """Parse the body of a request to `path`.

        Raises:
            ApiError: The servers cannot accept the body.
        """
        if self._model is not None:
            return await self._model.read(path, content)
        return await self._reader.read(content, vllm_body, path)

    @contextlib.asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[Answer]:
        """Open the answer, from its first token on. If the context ends early, all that runs for it at the servers is cancelled.

        Raises:
            ApiError: The answer is this error. While the answer is read: it was cut off.
        """
        if call.body.alone is not None:
            self._metrics("decode_alone", reason=call.body.alone).inc()
        failures: list[ServerFailed] = []
        while True:
            decode, prefill = self._lease(call.body, frozenset(failure.server for failure in failures if failure.kind != "stale"))
            is_sequential = any(failure.kind == "stale" for failure in failures)
            is_open = False
            try:
                async with self._attempt(call, decode, prefill, is_sequential=is_sequential) as answer:
                    is_open = True
                    yield answer
                return
            except ServerFailed as failure:
                if prefill is not None and isinstance(prefill.server, HttpServer):
                    prefill.server.learnt.failed(is_stale=failure.kind == "stale")
                self._metrics("server_failures", tier=failure.server.tier, reason=failure.kind).inc()
                if is_open:
                    raise ApiError(502, f"the answer was cut off: {failure}") from failure
                failures.append(failure)
                await self._before_next_attempt(call, failures)

    async def _before_next_attempt(self, call: Call, failures: list[ServerFailed]) -> None:
        """Wait until the next attempt may begin.

        A "stale" failure is nobody's fault as far as one can tell. It costs no retry and no pause: the sequential flow follows,
        which is never stale.

        Raises:
            ApiError: The last attempt has failed.
        """
        last, num_attempts = failures[-1], len(failures)
        is_stale = last.kind == "stale"
        num_retries = sum(failure.kind != "stale" for failure in failures) - 1
        if not is_stale and num_retries >= self._settings.retries:
            log.error("request_failed", request_id=call.request_id, tries=num_attempts, reason=str(last))
            text = str(last) if num_attempts == 1 else f"{last} (the last of {num_attempts} tries)"
            if last.status in (429, 503) or last.kind in ("unreachable", "lost"):
                raise ApiError(last.status or 503, text, retry_after_s=1) from last
            raise ApiError(502, text) from last
        log.warning("request_retried", request_id=call.request_id, reason=str(last), next_try=num_attempts + 1)
        self._metrics("retries").inc()
        if not is_stale:
            await asyncio.sleep(min(MAX_PAUSE_S, PAUSE_S * 2 ** (num_attempts - 1)))

    def _lease(self, body: Body, tried: frozenset[Server]) -> tuple[Lease[AnyServer], Lease[AnyServer] | None]:
        """Return the places of one attempt; without a prefill server decode computes the prompt, or has it computed."""
        decode = self.decode.lease(1, tried=tried)
        if decode is None:
            raise ApiError(503, self.decode.unavailable_reason(), retry_after_s=1)
        if body.alone is not None or not self.prefill.servers:
            return decode, None
        prefill = self.prefill.lease(body.prompt_tokens, tried=tried)
        if prefill is None:
            decode.end()
            raise ApiError(503, self.prefill.unavailable_reason(), retry_after_s=1)
        return decode, prefill

    @contextlib.asynccontextmanager
    async def _attempt(
        self, call: Call, decode: Lease[AnyServer], prefill: Lease[AnyServer] | None, *, is_sequential: bool
    ) -> AsyncIterator[Answer]:
        """Open the answer of one pair of servers. However it ends, nothing that is of no more use goes on at either."""
        transfer_id = secrets.token_hex(16)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(decode.end)
            server = None if prefill is None else prefill.server
            if prefill is None or server is None:
                flow, opening = "node" if self._settings.are_nodes else "alone", _decode(call, decode, None)
            elif not isinstance(server, HttpServer):
                stack.callback(prefill.end)
                flow, opening = "fetched", _decode(call, decode, server.params())
            elif self._settings.flow is FlowKind.SEQUENTIAL or is_sequential or (source := server.learnt.guess) is None:
                flow, opening = "sequential", self._sequential(call, decode, prefill, server, transfer_id)
            else:
                flow, opening = "concurrent", self._concurrent(call, decode, prefill, server, transfer_id, source)
            self._metrics("flows", flow=flow).inc()
            log.debug(
                "try_began",
                request_id=call.request_id,
                transfer_id=transfer_id,
                flow=flow,
                prefill=None if server is None else server.url,
                decode=decode.server.url,
            )
            yield await stack.enter_async_context(opening)

    @contextlib.asynccontextmanager
    async def _sequential(
        self, call: Call, decode: Lease[AnyServer], prefill: Lease[AnyServer], server: HttpServer, transfer_id: str
    ) -> AsyncIterator[Answer]:
        """Open the answer of decode once prefill has answered."""
        try:
            params = await self._prefill(call, prefill, server, transfer_id, is_sequential=True)
        finally:
            prefill.end()
        async with _decode(call, decode, params) as answer:
            yield answer

    async def _prefill(
        self, call: Call, lease: Lease[AnyServer], server: HttpServer, transfer_id: str, *, is_sequential: bool
    ) -> dict[str, Any] | None:
        started_s = time.monotonic()
        try:
            params = await server.prefill(call, transfer_id, is_sequential=is_sequential)
        except ServerFailed as failure:
            lease.failed(failure)
            raise
        lease.succeeded()
        self._metrics("prefill_seconds").observe(time.monotonic() - started_s)
        if params is None:
            self._metrics("prefills_without_kv").inc()
        return params

    @contextlib.asynccontextmanager
    async def _concurrent(
        self,
        call: Call,
        decode: Lease[AnyServer],
        prefill: Lease[AnyServer],
        server: HttpServer,
        transfer_id: str,
        source: KVSource,
    ) -> AsyncIterator[Answer]:
        """Open the answer of decode, which is given `source` before prefill has answered."""
        prefilling = asyncio.create_task(self._prefill(call, prefill, server, transfer_id, is_sequential=False))

        def ended(task: asyncio.Task[Any]) -> None:
            self._ending.discard(task)
            prefill.end()
            if not task.cancelled() and isinstance(task.exception(), ServerFailed):
                server.learnt.failed()

        prefilling.add_done_callback(ended)
        try:
            async with contextlib.AsyncExitStack() as stack:
                told = source.params(transfer_id)
                opening = asyncio.create_task(stack.enter_async_context(_decode(call, decode, told, is_guess=True)))
                try:
                    await asyncio.wait({prefilling, opening}, return_when=asyncio.FIRST_COMPLETED)
                    if not opening.done() and source_of(prefilling.result()) != source:  # the result raises where prefill failed
                        raise ServerFailed(server, "stale", f"the KV of its prompts is no longer at {source.address}")
                    answer = await opening
                finally:
                    opening.cancel()
                    await asyncio.gather(opening, return_exceptions=True)
                server.learnt.was_right()
                yield answer
        except BaseException:  # the attempt is given up, and the prefill request with it
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)
            raise
        if not prefilling.done():
            self._ending.add(prefilling)
            asyncio.get_running_loop().call_later(PREFILL_GRACE_S, prefilling.cancel)


@contextlib.asynccontextmanager
async def _decode(
    call: Call, lease: Lease[AnyServer], params: Mapping[str, Any] | None, *, is_guess: bool = False
) -> AsyncIterator[Answer]:
    """Open the answer of a decode server, and report to the server's breaker how it went.

    Args:
        is_guess: `params` come from an earlier answer of the prefill server. If decode fails before its first token they can be
            wrong: the decode server is not blamed, and the failure is "stale".
    """
    is_open = False
    try:
        async with lease.server.open(call, params) as answer:
            is_open = True
            lease.succeeded()
            yield answer
    except ServerFailed as failure:
        if failure.server is not lease.server:
            raise
        if is_guess and not is_open and failure.kind == "status":
            raise ServerFailed(failure.server, "stale", failure.reason, status=failure.status) from failure
        lease.failed(failure)
        raise
