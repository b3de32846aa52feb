"""A vLLM server behind the router, called over HTTP. Errors of aiohttp become failures of the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import aiohttp

from kvferry.router import sse
from kvferry.router.api import JSON_TYPE, SSE_TYPE, Answer, Call, PassedOn
from kvferry.router.kv_source import LearntSource, source_of
from kvferry.router.openai_body import KV_FIELD, VllmBody, prefill_params
from kvferry.router.servers import Server, ServerFailed

CHECK_TIMEOUT_S: Final = 3.0
"""Timeout of a health check. A server that computes long prompts may need a second."""

_KEEP_ALIVE_S: Final = 2.0  # below the 5 s after which uvicorn closes a connection, perhaps while a request is sent
_FINISH_S: Final = 1.0
_MAX_REASON_CHARS: Final = 300
_API_KEY: Final = "VLLM_API_KEY"  # vLLM uses this variable, too

_Data = TypeVar("_Data")


class HttpServer(Server):
    """See the module's docstring. Opened on the loop that uses it.

    Args:
        connect_timeout_s: Longest wait for a connection. Answers have no limit, because a prompt can wait long for its turn.
    """

    flow_alone = "alone"

    def __init__(
        self, url: str, tier: str, *, connect_timeout_s: float, lost_after_s: float, on_opened: Callable[[], None]
    ) -> None:
        super().__init__(url, tier, lost_after_s=lost_after_s, on_opened=on_opened)
        self.learnt = LearntSource(url)  # KV source of a prefill server
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),  # clients do not share cookies
        )

    async def close(self) -> None:
        await self._session.close()

    # Requests

    async def prefill(
        self, call: Call, transfer_id: str, *, is_sequential: bool, uses_first_token: bool
    ) -> dict[str, Any] | None:
        """Have the server compute the prompt. Return the `kv_transfer_params` for decode, and learn the KV's source.

        Args:
            uses_first_token: Decode may use the first token. If kvferry's connector answers, `use_first_token` is returned, too.

        Raises:
            PassedOn: The server rejected the request.
            ServerFailed: The server failed.
        """
        assert isinstance(call.body, VllmBody)
        own = prefill_params(transfer_id, is_sequential=is_sequential)
        content = call.body.prefill(own, uses_first_token=uses_first_token)
        async with self._post(call.path, content, call.headers) as response:
            params = self._params_of(await self._wait_for(response.read()))
        self.learnt.learn(params)
        if uses_first_token and params is not None and source_of(params) is not None:
            return {**params, "use_first_token": True}
        return params

    def forget(self, *, is_stale: bool = False) -> None:
        self.learnt.failed(is_stale=is_stale)

    @contextlib.asynccontextmanager
    async def open(self, call: Call, params: Mapping[str, Any] | None) -> AsyncIterator[Answer]:
        assert isinstance(call.body, VllmBody)
        async with self._post(call.path, call.body.decode(params), call.headers) as response:
            if response.content_type != SSE_TYPE:
                yield _answer(response, await self._wait_for(response.read()))
                return
            async with contextlib.aclosing(self._events(response)) as parts:
                yield _answer(response, await anext(parts), parts)

    async def models(self, headers: Mapping[str, str]) -> Answer:
        async with self._checked(), self._session.get(f"{self.url}/v1/models", headers=headers) as response:
            return _answer(response, await response.read())

    async def check(self) -> None:
        """Check the server's health, and the names of its models if they may have changed."""
        async with self._checked(), self._session.get(f"{self.url}/health", allow_redirects=False) as response:
            if response.status != 200:
                raise ServerFailed(self, "status", f"GET /health is answered with {response.status}", status=response.status)
        if self.are_names_due:
            key = os.environ.get(_API_KEY)
            answer = await self.models({"Authorization": f"Bearer {key}"} if key else {})
            if answer.status in (401, 403):
                reason = f"GET /v1/models is answered with {answer.status}; set {_API_KEY}"
                raise ServerFailed(self, "status", reason, status=answer.status)
            self.names = self._names_of(answer)
            self.are_names_due = False

    # Bytes

    @contextlib.asynccontextmanager
    async def _post(self, path: str, content: bytes, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open an answer with status 200. The end of the context closes its connection unless all of it was read.

        Raises:
            PassedOn: The server rejected the client's request.
            ServerFailed: The server did not answer, or cannot serve the request.
        """
        request = self._session.post(
            self.url + path, data=content, headers={**headers, "Content-Type": JSON_TYPE}, allow_redirects=False
        )
        response = await self._wait_for(request)
        try:
            if response.status != 200:
                raise self._refusal(_answer(response, await self._wait_for(response.read())))
            yield response
        finally:
            response.close()  # closes a connection with unread bytes, so vLLM gives the request up

    def _refusal(self, answer: Answer) -> Exception:
        if 400 <= answer.status < 500 and answer.status != 429:
            return PassedOn(answer)
        return ServerFailed(self, "status", f"answered {answer.status}: {_message_of(answer.content)}", status=answer.status)

    async def _wait_for(self, data: Awaitable[_Data]) -> _Data:
        """Return data from the server. Raises ServerFailed if it fails or is lost."""
        async with self._faults(), self.unless_lost():
            return await data

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        """Yield whole events. The first ones are held back until an event has a part of the answer.

        Until then the request can be sent to another server: vLLM answers 200 before it knows whether the KV came.
        """
        buffer, unsent = sse.EventBuffer(), b""
        has_begun = is_done = False
        while not is_done:
            received = await self._wait_for(response.content.readany())
            if not received:
                raise ServerFailed(self, "broken", "the stream ended before its last event")
            try:
                events = buffer.feed(received)
            except ValueError as error:
                raise ServerFailed(self, "broken", str(error)) from None
            is_done = any(sse.data_of(event) == sse.DONE for event in events[-2:])
            if not has_begun:  # reads all of them: an error can follow a chunk without a token, from vLLM's Rust frontend
                contents = [self._is_content(event) for event in events]
                has_begun = is_done or any(contents)
            unsent += b"".join(events)
            if has_begun and unsent:
                yield unsent
                unsent = b""
        # The server is about to end the answer. If the connection closes before, vLLM takes the client for disconnected.
        with contextlib.suppress(ServerFailed, TimeoutError):
            async with asyncio.timeout(_FINISH_S):
                while await self._wait_for(response.content.readany()):
                    pass

    def _is_content(self, event: bytes) -> bool:
        content = sse.object_of(event)
        if content is None:
            return False
        error = sse.error_of(content)
        if error is not None and error[0] >= 500:
            raise ServerFailed(self, "status", f"answered {error[0]} in its stream: {clip(error[1])}", status=error[0])
        return error is not None or not sse.is_empty(content)

    @contextlib.asynccontextmanager
    async def _checked(self) -> AsyncIterator[None]:
        async with self._faults(is_check=True):
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    yield
            except TimeoutError:
                raise ServerFailed(self, "unreachable", f"no answer within {CHECK_TIMEOUT_S:g} s") from None

    @contextlib.asynccontextmanager
    async def _faults(self, *, is_check: bool = False) -> AsyncIterator[None]:
        """Raise every error inside as a failure of the server. A health check reports a lost connection itself."""
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            reason = _reason(error)
            if not is_check:
                self.lose(reason)
            raise ServerFailed(self, "unreachable", reason, is_counted=False) from error  # `lose` counts
        except (aiohttp.ClientError, ValueError, OSError) as error:  # ValueError: a line or header that aiohttp cannot take
            raise ServerFailed(self, "broken", f"the answer broke off: {_reason(error)}") from error

    # Contents

    def _params_of(self, content: bytes) -> dict[str, Any] | None:
        try:
            params = json.loads(content).get(KV_FIELD)
        except (ValueError, AttributeError, RecursionError):
            raise ServerFailed(self, "broken", "answered 200 and no JSON object") from None
        if params is not None and not isinstance(params, dict):
            raise ServerFailed(self, "broken", f"answered with {KV_FIELD} that is not an object")
        return params or None

    def _names_of(self, answer: Answer) -> frozenset[str]:
        """Return the names of the server's models without adapters, which have a parent and can change."""
        try:
            models = json.loads(answer.content)["data"] if answer.status == 200 else None
            if isinstance(models, list):
                return frozenset(str(one["id"]) for one in models if not one.get("parent"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        reason = f"GET /v1/models is answered with {answer.status} and no list of models"
        raise ServerFailed(self, "broken", reason, status=answer.status)


def _answer(response: aiohttp.ClientResponse, content: bytes, rest: AsyncGenerator[bytes, None] | None = None) -> Answer:
    return Answer(
        content=content,
        rest=rest,
        status=response.status,
        content_type=response.content_type,
        retry_after=response.headers.get("Retry-After"),
    )


def _message_of(content: bytes) -> str:
    try:
        return clip(str(json.loads(content)["error"]["message"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return clip(content[:1000].decode(errors="replace")) or "no reason"


def _reason(error: BaseException) -> str:
    """Return aiohttp's error as one line, without its URL."""
    number = error.errno if isinstance(error, OSError) else None
    return clip((os.strerror(number) if number is not None and number > 0 else "") or str(error) or type(error).__name__)


def clip(text: str) -> str:
    """Return the text as one line of limited length."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_REASON_CHARS else line[: _MAX_REASON_CHARS - 1] + "…"
