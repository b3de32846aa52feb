"""A vLLM server, spoken to over HTTP: requests, health, names of models, and every fault of aiohttp's as one of the server's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from kvferry.router.api import JSON_TYPE
from kvferry.router.servers import Server, ServerFailed

CHECK_TIMEOUT_S: Final = 3.0
"""Of a health check; a server that is busy with long prompts may take a second."""

_KEEP_ALIVE_S: Final = 2.0  # below the 5 s after which uvicorn closes a connection, perhaps just as a request is on its way
_MAX_REASON_CHARS: Final = 300
_API_KEY: Final = "VLLM_API_KEY"  # where vLLM, too, looks for its key


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSource:
    """Where a decode server finds the KV of a prefill server's prompts.

    Args:
        address: host:port (remote_address).
        engine_id: Names one life of the engine (remote_engine_id).
    """

    address: str
    engine_id: str

    def params(self, transfer_id: str) -> dict[str, Any]:
        """`kv_transfer_params` for the decode server, as the prefill server's answer would have them."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_address": self.address,
            "remote_engine_id": self.engine_id,
        }


def source_of(params: Mapping[str, Any] | None) -> KVSource | None:
    """The source that a prefill server's `kv_transfer_params` name; None where they name none, as those of other connectors."""
    if params is None:
        return None
    address, engine_id = params.get("remote_address"), params.get("remote_engine_id")
    if not (isinstance(address, str) and address and isinstance(engine_id, str) and engine_id):
        return None
    return KVSource(address=address, engine_id=engine_id)


class HttpServer(Server):
    """See the module's docstring. Opened on the loop that uses it.

    Args:
        url: Scheme, host, port, and perhaps a path.
        connect_timeout_s: Longest wait for a connection. For an answer there is none: a prompt may wait long for its turn.
    """

    def __init__(
        self, url: str, tier: str, *, connect_timeout_s: float, lost_after_s: float, on_opened: Callable[[str], None]
    ) -> None:
        super().__init__(url, tier, lost_after_s=lost_after_s, on_opened=on_opened)
        self.source: KVSource | None = None  # of a prefill server, once it is known
        self.doubt = 0.0  # whether that is so at the next request, too; see `kvferry.router.prefill.doubt`
        self.is_without_kv = False  # its last answer did not say where the KV is
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),  # what one client's request is given is none of the next one's
        )

    async def close(self) -> None:
        await self._session.close()

    @contextlib.asynccontextmanager
    async def post(self, path: str, content: bytes, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose head has come; at the end of the context its connection is closed unless all of it was read.

        Args:
            content: The request's body, JSON.

        Raises:
            ServerFailed: None came.
        """
        async with self.faults(), self.unless_lost():
            answer = await self._session.post(
                self.url + path, data=content, headers={**headers, "Content-Type": JSON_TYPE}, allow_redirects=False
            )
        try:
            yield answer
        finally:
            answer.close()  # a connection that still has bytes to bring is closed, by which vLLM knows that nobody waits

    async def read(self, answer: aiohttp.ClientResponse) -> bytes:
        """All of an answer.

        Raises:
            ServerFailed: It broke off.
        """
        async with self.faults(), self.unless_lost():
            return await answer.read()

    async def read_some(self, answer: aiohttp.ClientResponse) -> bytes:
        """The next bytes of an answer; empty at its end.

        Raises:
            ServerFailed: It broke off.
        """
        async with self.faults(), self.unless_lost():
            return await answer.content.readany()

    async def get_models(self, headers: Mapping[str, str]) -> tuple[int, str, bytes]:
        """Status, content type and body of its `/v1/models`.

        Raises:
            ServerFailed: It did not answer.
        """
        async with (
            self.faults(is_check=True),
            self._checking(),
            self._session.get(f"{self.url}/v1/models", headers=headers) as answer,
        ):
            return answer.status, answer.content_type, await answer.read()

    async def check(self) -> None:
        """Ask for its health, and where they may have changed for the names of its models.

        Raises:
            ServerFailed: It is not healthy, or does not answer.
        """
        async with (
            self.faults(is_check=True),
            self._checking(),
            self._session.get(f"{self.url}/health", allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise ServerFailed(self, "status", f"GET /health is answered with {answer.status}", status=answer.status)
        if self.are_names_due:
            key = os.environ.get(_API_KEY)
            status, _, content = await self.get_models({"Authorization": f"Bearer {key}"} if key else {})
            if status in (401, 403):
                raise ServerFailed(self, "status", f"GET /v1/models is answered with {status}; set {_API_KEY}", status=status)
            self.names = _names_of(self, status, content)
            self.are_names_due = False

    @contextlib.asynccontextmanager
    async def _checking(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                yield
        except TimeoutError:
            raise ServerFailed(self, "unreachable", f"no answer within {CHECK_TIMEOUT_S:g} s") from None

    @contextlib.asynccontextmanager
    async def faults(self, *, is_check: bool = False) -> AsyncIterator[None]:
        """What goes wrong inside, as a fault of the server. A health check has its own way to tell of it."""
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            reason = _reason(error)
            if not is_check:
                self.lose(reason)
            raise ServerFailed(self, "unreachable", reason) from error
        except (aiohttp.ClientError, ValueError, OSError) as error:  # ValueError: a line or header that aiohttp cannot take
            raise ServerFailed(self, "broken", f"the answer broke off: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """One line on what aiohttp says, without its URL."""
    number = error.errno if isinstance(error, OSError) else None
    return clip((os.strerror(number) if number is not None and number > 0 else "") or str(error) or type(error).__name__)


def clip(text: str) -> str:
    """One line, not too long."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_REASON_CHARS else line[: _MAX_REASON_CHARS - 1] + "…"


def _names_of(server: HttpServer, status: int, content: bytes) -> frozenset[str]:
    """Names of the models that a server was started with; adapters, which have a parent, may come and go."""
    try:
        models = json.loads(content)["data"] if status == 200 else None
        if isinstance(models, list):
            return frozenset(str(one["id"]) for one in models if not one.get("parent"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ServerFailed(server, "broken", f"GET /v1/models is answered with {status} and no list of models", status=status)
