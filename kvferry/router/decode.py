"""One request at one decode server: its answer, opened as far as the first of it that is worth anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final

import aiohttp

from kvferry.router import sse
from kvferry.router.api import SSE_TYPE, Call, Head
from kvferry.router.http_server import HttpServer, clip
from kvferry.router.openai_body import VllmBody
from kvferry.router.prefill import check_status
from kvferry.router.servers import ServerFailed

_FINISH_S: Final = 1.0


class DecodeAnswer:
    """A decode server's answer, from its first token on.

    Args:
        head: For the client.
        first: The whole answer, or the first events of a stream.
    """

    def __init__(
        self, server: HttpServer, answer: aiohttp.ClientResponse, head: Head, first: bytes, rest: _Events | None
    ) -> None:
        self.head = head
        self._server = server
        self._answer = answer
        self._first = first
        self._rest = rest

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """All that goes to the client.

        Raises:
            ServerFailed: It broke off.
        """
        yield self._first
        if self._rest is None:
            return
        while not self._rest.is_done:
            events = await self._rest.more()
            if events:
                yield b"".join(events)
        await self._rest.finish()


class _Events:
    """The events of an answer, as they come."""

    def __init__(self, server: HttpServer, answer: aiohttp.ClientResponse) -> None:
        self._server = server
        self._answer = answer
        self._buffer = sse.EventBuffer()
        self.is_done = False

    async def more(self) -> list[bytes]:
        """The next ones; none where an event is not whole yet.

        Raises:
            ServerFailed: The stream ended before its last event.
        """
        received = await self._server.read_some(self._answer)
        if not received:
            raise ServerFailed(self._server, "broken", "the stream ended before its last event")
        try:
            events = self._buffer.feed(received)
        except ValueError as error:
            raise ServerFailed(self._server, "broken", str(error)) from None
        self.is_done = any(sse.data_of(event) == sse.DONE for event in events[-2:])
        return events

    async def finish(self) -> None:
        """After the last event: let the server end the answer itself, which it is about to. So it does not take us for gone."""
        with contextlib.suppress(ServerFailed, TimeoutError):
            async with asyncio.timeout(_FINISH_S):
                while await self._server.read_some(self._answer):
                    pass


@contextlib.asynccontextmanager
async def open_decode(call: Call[VllmBody], server: HttpServer, params: Mapping[str, Any] | None) -> AsyncIterator[DecodeAnswer]:
    """The server's answer; at the end of the context what is left of the request there is given up.

    Args:
        params: `kv_transfer_params`; None: the server computes the prompt itself.

    Raises:
        PassedOn: It refused the request.
        ServerFailed: It failed before the first token.
    """
    async with server.post(call.path, call.body.decode(params), call.headers) as answer:
        head = Head(
            status=answer.status,
            content_type=answer.content_type,
            is_stream=answer.status == 200 and answer.content_type == SSE_TYPE,
            retry_after=answer.headers.get("Retry-After"),
        )
        if not head.is_stream:
            content = await server.read(answer)
            check_status(server, head, content)
            yield DecodeAnswer(server, answer, head, content, None)
            return
        events = _Events(server, answer)
        yield DecodeAnswer(server, answer, head, await _first_events(server, events), events)


async def _first_events(server: HttpServer, events: _Events) -> bytes:
    """Events up to the first with something of the answer in it: until that has gone out, another server can be tried."""
    held: list[bytes] = []
    while True:
        came = await events.more()
        held += came
        for event in came:
            content = sse.object_of(event)
            if content is None:
                continue
            error = sse.error_of(content)
            if error is not None and error[0] >= 500:
                raise ServerFailed(server, "status", f"answered {error[0]} in its stream: {clip(error[1])}", status=error[0])
            if error is not None or not sse.is_empty(content):
                return b"".join(held)
        if events.is_done:
            return b"".join(held)
