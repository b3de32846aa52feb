"""One attempt of a request, at a decode server and, if a prefill server computes the prompt, also there.

The flow depends on how decode learns the source of the KV:

- *sequential*, vLLM prefill servers: decode is called after prefill has answered, with the `kv_transfer_params` of that answer,
  and with `use_first_token` if the connector was known as kvferry's. This works with any connector.
- *concurrent*, vLLM prefill servers: both are called at once, decode with the parameters that prefill's answer would have. The
  router learns the source of the KV from the server's answers. So the first request goes there sequentially, and so does the
  first after a failure (docs/adr/0025-concurrent-prefill-and-decode.md).
- *fetched*, kvferry's prefill nodes: only decode is called. kvferry's connector has the named node compute the prompt.
- *node*, kvferry's decode nodes: they find their prefill nodes by themselves.
- *alone*: the decode server computes a prompt that cannot be handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from kvferry.router.api import Answer, Call
from kvferry.router.http_server import HttpServer
from kvferry.router.kv_source import KVSource, source_of
from kvferry.router.metrics import RouterMetrics
from kvferry.router.servers import Lease, ServerFailed

log = structlog.get_logger(__name__)

PREFILL_GRACE_S: Final = 10.0
"""Longest time that a prefill request may take after decode has all the KV. Its answer usually follows within milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAttempt:
    """See the module's docstring.

    Args:
        decode: Place at the decode server.
        prefill: Place at the prefill server; None if decode computes the prompt, or has it computed.
        may_guess: Whether decode may be called before prefill has answered.
        ending: Prefill requests that continue after their attempt.
        transfer_id: Names the hand-off at both servers.
    """

    call: Call
    decode: Lease
    prefill: Lease | None
    may_guess: bool
    metrics: RouterMetrics
    ending: set[asyncio.Task[Any]]
    transfer_id: str = field(default_factory=lambda: secrets.token_hex(16))

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Answer]:
        """Open the answer. The end of the context cancels all work at both servers that is not needed any more.

        Raises:
            ApiError: The request is wrong.
            ServerFailed: A server failed. It is "stale" if decode looked for the KV in the wrong place.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.decode.end)
            if self.prefill is None:
                flow, opening = self.decode.server.flow_alone, self._decode(None)
            elif (params := self.prefill.server.params()) is not None:
                stack.callback(self.prefill.end)
                flow, opening = "fetched", self._decode(params)
            else:
                server = self.prefill.server
                assert isinstance(server, HttpServer)
                source = server.learnt.guess if self.may_guess else None
                flow = "sequential" if source is None else "concurrent"
                opening = self._handed_over(self.prefill, server, source)
            self.metrics.counter("flows", flow=flow).inc()
            log.debug(
                "try_began",
                request_id=self.call.request_id,
                transfer_id=self.transfer_id,
                flow=flow,
                prefill=None if self.prefill is None else self.prefill.server.url,
                decode=self.decode.server.url,
            )
            yield await stack.enter_async_context(opening)

    @contextlib.asynccontextmanager
    async def _handed_over(self, prefill: Lease, server: HttpServer, source: KVSource | None) -> AsyncIterator[Answer]:
        """Open the answer of decode, once prefill has answered or, if the KV is expected at `source`, before."""
        # Read here, because a failure of another request can change it before the task begins.
        is_known = server.learnt.source is not None
        prefilling = asyncio.create_task(self._prefill(prefill, server, is_sequential=source is None, uses_first_token=is_known))

        def ended(task: asyncio.Task[Any]) -> None:
            self.ending.discard(task)
            prefill.end()
            if not task.cancelled() and isinstance(task.exception(), ServerFailed):
                server.forget()

        prefilling.add_done_callback(ended)
        try:
            async with contextlib.AsyncExitStack() as stack:
                if source is None:
                    yield await stack.enter_async_context(self._decode(await prefilling))
                else:
                    yield await self._open_early(stack, server, source, prefilling)
        except BaseException:  # the attempt and its prefill request are given up
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)
            raise
        if not prefilling.done():
            self.ending.add(prefilling)
            asyncio.get_running_loop().call_later(PREFILL_GRACE_S, prefilling.cancel)

    async def _open_early(
        self, stack: contextlib.AsyncExitStack, server: HttpServer, source: KVSource, prefilling: asyncio.Task[Any]
    ) -> Answer:
        """Open the answer of decode, which gets `source`, unless prefill fails or reports another source before."""
        decode = self._decode(source.params(self.transfer_id), is_guess=True)
        opening = asyncio.create_task(stack.enter_async_context(decode))
        try:
            await asyncio.wait({prefilling, opening}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done() and source_of(prefilling.result()) != source:  # the result raises if prefill failed
                raise ServerFailed(server, "stale", f"the KV of its prompts is no longer at {source.address}")
            answer = await opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        server.learnt.was_right()
        return answer

    async def _prefill(
        self, lease: Lease, server: HttpServer, *, is_sequential: bool, uses_first_token: bool
    ) -> dict[str, Any] | None:
        started_s = time.monotonic()
        try:
            params = await server.prefill(
                self.call, self.transfer_id, is_sequential=is_sequential, uses_first_token=uses_first_token
            )
        except ServerFailed as failure:
            lease.failed(failure)
            raise
        lease.succeeded()
        self.metrics.histogram("prefill_seconds").observe(time.monotonic() - started_s)
        if params is None:
            self.metrics.counter("prefills_without_kv").inc()
        return params

    @contextlib.asynccontextmanager
    async def _decode(self, params: Mapping[str, Any] | None, *, is_guess: bool = False) -> AsyncIterator[Answer]:
        """Open the answer of the decode server, and report the outcome to its breaker.

        Args:
            is_guess: `params` come from an earlier answer of the prefill server. If decode fails before its first token, they can
                be wrong. The failure is then "stale", and does not count against the decode server.
        """
        is_open = False
        try:
            async with self.decode.server.open(self.call, params) as answer:
                is_open = True
                self.decode.succeeded()
                yield answer
        except ServerFailed as failure:
            if is_guess and not is_open and failure.kind == "status":
                raise ServerFailed(failure.server, "stale", failure.reason, status=failure.status) from failure
            self.decode.failed(failure)
            raise
