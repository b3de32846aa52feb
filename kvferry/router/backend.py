"""The servers behind a router: their health, and the attempts of each request until its first token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import structlog

from kvferry.router.api import Answer, ApiError, Body, Call
from kvferry.router.attempt import PairAttempt
from kvferry.router.body_reader import BodyReader
from kvferry.router.http_server import HttpServer
from kvferry.router.metrics import RouterMetrics
from kvferry.router.openai_body import vllm_body
from kvferry.router.servers import Lease, Server, ServerFailed, Tier, compare_names
from kvferry.router.settings import FlowKind, RouterSettings, is_node
from node_runtime.health import Readiness

if TYPE_CHECKING:
    from kvferry.router.node_model import NodeModel
    from transfer.registry.security import Security

log = structlog.get_logger(__name__)

PAUSE_S: Final = 0.05
"""Pause before the second attempt, which goes to the same server if there is no other. It doubles before each later attempt."""

MAX_PAUSE_S: Final = 1.0


class Backend:
    """See the module's docstring. Opened on the loop that uses it.

    Args:
        security: TLS or plain text of calls to nodes. None means that there are no nodes.

    Raises:
        ConfigError: The tokenizer cannot be used.
    """

    def __init__(self, settings: RouterSettings, security: Security | None, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._security = security
        self._metrics = metrics
        self._reader = BodyReader()
        self._model: NodeModel | None = None
        if is_node(settings.decode[0]):
            from kvferry.router.node_model import NodeModel  # imports gRPC

            self._model = NodeModel(settings)
        self.prefill = Tier([self._server(url, "prefill") for url in settings.prefill])
        self.decode = Tier([self._server(url, "decode") for url in settings.decode])
        self._ending: set[asyncio.Task[Any]] = set()  # prefill requests whose attempt is over

    def _server(self, url: str, tier: str) -> Server:
        common: dict[str, Any] = {
            "lost_after_s": self._settings.lost_after_s,
            "on_opened": lambda: self._metrics.counter("breaker_openings", tier=tier).inc(),
        }
        if not is_node(url):
            return HttpServer(url, tier, connect_timeout_s=self._settings.connect_timeout_s, **common)
        from kvferry.router.node_server import NodeServer  # imports gRPC

        assert self._security is not None
        return NodeServer(url, tier, self._security, self._model, **common)

    @property
    def _tiers(self) -> tuple[Tier, ...]:
        return (self.prefill, self.decode) if self.prefill.servers else (self.decode,)

    async def close(self) -> None:
        """Close all connections."""
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await asyncio.gather(*(server.close() for tier in self._tiers for server in tier.servers))

    # Health

    async def watch(self) -> None:
        """Check the servers' health until cancelled."""
        async with asyncio.TaskGroup() as group:
            for tier in self._tiers:
                for server in tier.servers:
                    group.create_task(self._watch(server))

    async def _watch(self, server: Server) -> None:
        while True:
            try:
                await server.check()
            except ServerFailed as failure:
                server.check_failed(failure.reason)
                if failure.kind == "unreachable":
                    server.forget()
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
        """Return the answer to `/v1/models`. Raises ApiError if no server can answer."""
        misfits = [server.misfit for server in self.prefill.servers]
        if misfits and all(misfits):
            raise ApiError(503, f"no prefill server serves the models of the decode servers: {'; '.join(misfits)}")
        server = self.decode.pick()
        assert server is not None  # the first server always fits
        try:
            return await server.models(headers)
        except ServerFailed as failure:
            raise ApiError(503, str(failure)) from failure

    async def read(self, path: str, content: bytes) -> Body:
        """Parse the body of a request to `path`. Raises ApiError if the servers do not accept it."""
        if self._model is not None:
            return await self._model.read(path, content)
        return await self._reader.read(content, vllm_body, path)

    @contextlib.asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[Answer]:
        """Open the answer, from its first token on. The end of the context cancels its work at the servers.

        Raises:
            ApiError: All attempts failed. While the answer is read: it was cut off.
        """
        if call.body.alone is not None:
            self._metrics.counter("decode_alone", reason=call.body.alone).inc()
        failures: list[ServerFailed] = []
        while True:
            decode, prefill = self._lease(call.body, frozenset(failure.server for failure in failures if failure.kind != "stale"))
            attempt = PairAttempt(
                call=call,
                decode=decode,
                prefill=prefill,
                may_guess=self._settings.flow is FlowKind.CONCURRENT and all(failure.kind != "stale" for failure in failures),
                metrics=self._metrics,
                ending=self._ending,
            )
            is_open = False
            try:
                async with attempt.open() as answer:
                    is_open = True
                    yield answer
                return
            except ServerFailed as failure:
                if prefill is not None:
                    prefill.server.forget(is_stale=failure.kind == "stale")
                self._metrics.counter("server_failures", tier=failure.server.tier, reason=failure.kind).inc()
                if is_open:
                    raise ApiError(502, f"the answer was cut off: {failure}") from failure
                failures.append(failure)
                await self._before_next_attempt(call, failures)

    async def _before_next_attempt(self, call: Call, failures: list[ServerFailed]) -> None:
        """Wait until the next attempt may begin. Raises ApiError if no retry is left.

        A "stale" failure costs no retry and no pause: the sequential flow follows, which is never stale.
        """
        last, num_attempts = failures[-1], len(failures)
        is_stale = last.kind == "stale"
        num_retries = sum(failure.kind != "stale" for failure in failures) - 1
        if not is_stale and num_retries >= self._settings.retries:
            log.error("request_failed", request_id=call.request_id, tries=num_attempts, reason=str(last))
            text = str(last) if num_attempts == 1 else f"{last} (the last of {num_attempts} tries)"
            if last.status in (429, 503) or last.kind in ("unreachable", "lost"):
                raise ApiError(last.status or 503, text) from last
            raise ApiError(502, text) from last
        log.warning("request_retried", request_id=call.request_id, reason=str(last), next_try=num_attempts + 1)
        self._metrics.counter("retries").inc()
        if not is_stale:
            await asyncio.sleep(min(MAX_PAUSE_S, PAUSE_S * 2 ** (num_attempts - 1)))

    def _lease(self, body: Body, tried: frozenset[Server]) -> tuple[Lease, Lease | None]:
        """Return the places of one attempt. None instead of a prefill server means that decode handles the prompt."""
        decode = self.decode.lease(1, tried=tried)
        if decode is None:
            raise ApiError(503, self.decode.unavailable_reason())
        if body.alone is not None or not self.prefill.servers:
            return decode, None
        prefill = self.prefill.lease(body.prompt_tokens, tried=tried)
        if prefill is None:
            decode.end()
            raise ApiError(503, self.prefill.unavailable_reason())
        return decode, prefill
