"""One prompt at one prefill server."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from kvferry.router.api import Call, Head
from kvferry.router.http_server import HttpServer, KVSource, clip, source_of
from kvferry.router.metrics import RouterMetrics
from kvferry.router.openai_body import KV_FIELD, VllmBody, prefill_params
from kvferry.router.servers import Lease, ServerFailed

log = structlog.get_logger(__name__)

MOST_DOUBT: Final = 3.0
"""Each time that a server's address turned out to be another one adds 1, and each time that it was right takes `_TRUST` away.
From here on it is taken for several engines behind one URL (data parallel): which of them has a prompt only its answer tells."""

_TRUST: Final = 0.1


class PassedOn(Exception):
    """A server has answered with what is the client's affair, and goes to it unchanged."""

    def __init__(self, head: Head, content: bytes) -> None:
        super().__init__(f"passed on: {head.status}")
        self.head = head
        self.content = content


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """What a prefill server has answered.

    Args:
        params: Its `kv_transfer_params`; None: it has none.
        source: Where the KV is, where they say it in our words.
    """

    params: dict[str, Any] | None
    source: KVSource | None


async def run_prefill(
    call: Call[VllmBody], lease: Lease[HttpServer], transfer_id: str, *, is_sequential: bool, metrics: RouterMetrics
) -> Prefilled:
    """Have the server compute the prompt, and learn from its answer where its KV is to be had.

    Raises:
        PassedOn: It refused the request.
        ServerFailed: It failed.
    """
    content = call.body.prefill(prefill_params(transfer_id, is_sequential=is_sequential))
    server = lease.server
    started_s = time.monotonic()
    try:
        async with server.post(call.path, content, call.headers) as answer:
            told = await server.read(answer)
            head = Head(status=answer.status, content_type=answer.content_type, retry_after=answer.headers.get("Retry-After"))
        check_status(server, head, told)
        params = _params_of(server, told)
    except ServerFailed as failure:
        if failure.kind != "unreachable":  # that its breaker was told already
            lease.failed(failure.reason)
        raise
    lease.succeeded()
    _learn(server, params)
    metrics.prefill_answered(time.monotonic() - started_s, has_kv=params is not None)
    return Prefilled(params=params, source=source_of(params))


def check_status(server: HttpServer, head: Head, content: bytes) -> None:
    """Nothing, for an answer that is one.

    Raises:
        PassedOn: It says that the client's request is wrong.
        ServerFailed: It says that the server cannot serve it, now or ever.
    """
    if head.status == 200:
        return
    if 400 <= head.status < 500 and head.status != 429:
        raise PassedOn(head, content)
    raise ServerFailed(server, "status", f"answered {head.status}: {_message_of(content)}", status=head.status)


def _message_of(content: bytes) -> str:
    try:
        return clip(str(json.loads(content)["error"]["message"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return clip(content[:1000].decode(errors="replace")) or "no reason"


def _params_of(server: HttpServer, content: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(content)
        params = answer.get(KV_FIELD)
    except (ValueError, AttributeError, RecursionError):
        raise ServerFailed(server, "broken", "answered 200 and no JSON object") from None
    if params is not None and not isinstance(params, dict):
        raise ServerFailed(server, "broken", f"answered with {KV_FIELD} that is no object")
    return params or None


def _learn(server: HttpServer, params: Mapping[str, Any] | None) -> None:
    if params is None and not server.is_without_kv:
        log.warning(
            "prefill_without_kv",
            url=server.url,
            reason=f"its answer has no {KV_FIELD}: it has no KV connector, and decode servers compute its prompts again "
            "(vLLM's --kv-transfer-config)",
        )
    server.is_without_kv = params is None
    source = source_of(params)
    if source == server.source:
        return
    server.source = source
    if source is not None:
        log.info("prefill_address_learnt", url=server.url, address=source.address, engine_id=source.engine_id)


def forget(server: HttpServer) -> None:
    """It has failed, and may come back as another engine: its address is learnt anew."""
    server.source, server.doubt = None, 0.0


def doubt(server: HttpServer) -> None:
    """Decode was told an address that seems to be wrong: it is learnt anew, too, unless that happens again and again."""
    server.source = None
    server.doubt += 1
    if server.doubt - 1 < MOST_DOUBT <= server.doubt:
        reason = "its address differs from answer to answer, as of several engines behind one URL: sequential from now on"
        log.warning("prefill_address_unsteady", url=server.url, reason=reason)


def trust(server: HttpServer) -> None:
    """Decode was told an address, and got the KV."""
    if server.doubt < MOST_DOUBT:
        server.doubt = max(0.0, server.doubt - _TRUST)
