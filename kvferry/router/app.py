"""The router's HTTP API: limits, answers, streams, and clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from aiohttp import web

from kvferry.router.api import CHAT, COMPLETIONS, SSE_TYPE, Answer, ApiError, Call
from kvferry.router.backend import Backend
from kvferry.router.metrics import RouterMetrics
from kvferry.router.settings import RouterSettings
from transfer.metrics import MetricsPage

log = structlog.get_logger(__name__)

BODY_S: Final = 60.0
"""Longest time for a client to send its request's body."""

_ENDPOINTS: Final = {COMPLETIONS: "completions", CHAT: "chat"}
_PASSED_HEADERS: Final = ("Authorization", "traceparent", "tracestate")
_REQUEST_ID: Final = "X-Request-Id"
_GOOD_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,96}")


class RouterApp:
    """Serve a `Backend`. Owned by one loop. The server must cancel handlers of disconnected clients (`handler_cancellation`)."""

    def __init__(self, backend: Backend, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self._backend = backend
        self._settings = settings
        self._metrics = metrics
        self._metrics_page = MetricsPage()
        self._running: set[Reply] = set()
        self._num_body_bytes = 0  # body bytes of running requests
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    def application(self) -> web.Application:
        """Return the application to run."""
        app = web.Application(middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post(COMPLETIONS, self._generate),
                web.post(CHAT, self._generate),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._serve_metrics),
            ]
        )
        return app

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> int:
        """Reject new requests and wait for running ones. Then, or at `hurry`, cut off the rest, and return their number."""
        self._is_draining = True
        waits = [asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(hurry.wait())]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        cut_off = list(self._running)
        for reply in cut_off:
            with contextlib.suppress(RuntimeError):  # its answer is complete
                reply.timeout.reschedule(asyncio.get_running_loop().time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):  # limit for clients that do not read the error
                await self._idle.wait()
        return len(cut_off)

    # Requests to generate

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        given_id = request.headers.get(_REQUEST_ID, "")
        request_id = given_id if _GOOD_ID.fullmatch(given_id) else secrets.token_hex(8)
        try:
            response = await self._counted(request, request_id)
        except (ApiError, web.HTTPException) as error:
            response = _error_response(request, error)
        except ConnectionError:  # the client has closed the connection and receives no response
            return web.Response(status=499)
        if not response.prepared:
            response.headers[_REQUEST_ID] = request_id
        return response

    async def _counted(self, request: web.Request, request_id: str) -> web.StreamResponse:
        """Answer a request unless there is no room for it, and count it by its outcome."""
        endpoint = _ENDPOINTS[request.path]
        if self._is_draining or len(self._running) >= self._settings.max_requests:
            self._metrics.counter("requests", endpoint=endpoint, outcome="refused").inc()
            full = f"{self._settings.max_requests} requests are under way, as many as the router takes (--max-requests)"
            raise ApiError(503, "the router is shutting down" if self._is_draining else full)
        reply, outcome = Reply(request, request_id), "failed"
        self._running.add(reply)
        self._idle.clear()
        self._metrics.gauge("running_requests").inc()
        try:
            response = await self._answered(request, reply)
            outcome = _outcome(response.status) if not reply.is_cut_off else "failed"
            return response
        except _NoRoom:
            outcome = "refused"
            raise
        except (ApiError, web.HTTPException) as error:
            outcome = _outcome(error.status)
            raise
        except (asyncio.CancelledError, ConnectionError):
            outcome = "disconnected"
            raise
        finally:
            self._running.discard(reply)
            self._num_body_bytes -= reply.num_body_bytes
            if not self._running:
                self._idle.set()
            self._metrics.gauge("running_requests").inc(-1)
            self._metrics.counter("requests", endpoint=endpoint, outcome=outcome).inc()

    async def _answered(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        """Answer a request. If that fails in a stream, or the reply's timeout expires, report it to the client."""
        try:
            async with reply.timeout:
                return await self._answer(request, reply)
        except ApiError as failure:
            error = failure
        except TimeoutError:
            if not reply.timeout.expired():
                raise
            error = ApiError(503, "the router has shut down")
        if reply.stream is None:
            raise error
        return await reply.cut_off(error)

    async def _answer(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        arrived_s = time.monotonic()
        call = Call(
            path=request.path,
            body=await self._backend.read(request.path, await self._content_of(request, reply)),
            headers=_passed_headers(request) | {_REQUEST_ID: reply.request_id},
            request_id=reply.request_id,
        )
        async with self._backend.answer(call) as answer:
            if answer.status == 200:
                self._metrics.histogram("time_to_first_token_seconds").observe(time.monotonic() - arrived_s)
            if answer.rest is None:
                return _whole(answer)
            await reply.write(answer.content)
            async for part in answer.rest:
                await reply.write(part)
        return await reply.end()

    async def _content_of(self, request: web.Request, reply: Reply) -> bytes:
        """Return the request's body, whose bytes count as held until the request ends."""
        coding = request.headers.get("Content-Encoding", "identity")
        if coding.lower() != "identity":
            raise ApiError(415, f"Content-Encoding is {coding!r}; bodies are not compressed here")
        most, most_together = self._settings.max_body_bytes, self._settings.max_body_total_bytes
        too_large = ApiError(413, f"the body has more than {most} bytes, the most that the router takes (--max-body)")
        if (request.content_length or 0) > most:
            raise too_large
        content = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.content.iter_any():
                    if len(content) + len(part) > most:
                        raise too_large
                    if self._num_body_bytes + len(part) > most_together:
                        text = f"the requests under way have bodies of {most_together} bytes, the most that the router takes"
                        raise _NoRoom(503, f"{text} (--max-body-total)")
                    self._num_body_bytes += len(part)
                    reply.num_body_bytes += len(part)
                    content += part
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_S:g} s") from None
        return bytes(content)

    # Everything else

    async def _models(self, request: web.Request) -> web.Response:
        return _whole(await self._backend.models(_passed_headers(request)))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        state = self._backend.readiness()
        if self._is_draining or not state.is_ready:
            return web.Response(text=f"{'the router is draining' if self._is_draining else state.reason}\n", status=503)
        return web.Response(text="ready\n")

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        families = self._metrics.collect(self._backend.num_servers())
        text, content_type = self._metrics_page.render(families, request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})


class _NoRoom(ApiError):
    """The router holds its maximum of body bytes."""


class Reply:
    """The answer to one client."""

    def __init__(self, request: web.Request, request_id: str) -> None:
        self.request_id = request_id
        self.timeout = asyncio.timeout(None)
        self.stream: web.StreamResponse | None = None
        self.is_cut_off = False
        self.num_body_bytes = 0
        self._request = request

    async def write(self, part: bytes) -> None:
        """Send the next part of a stream."""
        if self.stream is None:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", _REQUEST_ID: self.request_id}
            self.stream = web.StreamResponse(headers=headers)
            self.stream.content_type, self.stream.charset = SSE_TYPE, "utf-8"
            await self.stream.prepare(self._request)
        await self.stream.write(part)

    async def end(self) -> web.StreamResponse:
        assert self.stream is not None
        await self.stream.write_eof()
        return self.stream

    async def cut_off(self, error: ApiError) -> web.StreamResponse:
        """End a stream with an error event."""
        assert self.stream is not None
        self.is_cut_off = True
        log.error("stream_cut_off", request_id=self.request_id, reason=error.message)
        await self.stream.write(error.event())
        return await self.end()


def _outcome(status: int) -> str:
    return "done" if status < 400 else "client_error" if status < 500 else "failed"


def _passed_headers(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _PASSED_HEADERS if name in request.headers}


def _whole(answer: Answer) -> web.Response:
    headers = {"Content-Type": answer.content_type}
    if answer.retry_after is not None:
        headers["Retry-After"] = answer.retry_after
    return web.Response(status=answer.status, body=answer.content, headers=headers)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (ApiError, web.HTTPException) as error:
        return _error_response(request, error)


def _error_response(request: web.Request, error: ApiError | web.HTTPException) -> web.Response:
    """Return an error in OpenAI's shape."""
    if isinstance(error, ApiError):
        return _whole(error.answer())
    response = _whole(ApiError(error.status, f"{request.method} {request.path}: {error.reason}").answer())
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
