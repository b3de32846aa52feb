"""The status page of a node: `/`, one file that needs nothing else, and `/status.json`, what it shows.

The HTTP port knows no callers, so nothing of a prompt is here, and of a request's id, which its client chose, only a word that
stands for it. What it costs does not grow with those who look: a state is made at most every `KEPT_S`, and turned into JSON
beside the loop.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # a node whose settings are wrong ends before it has loaded gRPC
    from node_runtime.peer_look_client import PeerSeen
    from transfer.pb import kvferry_pb2 as pb

KEPT_S: Final = 0.25
MAX_REQUESTS: Final = 100
"""The oldest so many are shown."""

PAGE: Final = (Path(__file__).with_name("status_page.html")).read_bytes()


def _content_policy(page: bytes) -> str:
    """Lets the page run its own script and style, ask its own server, and nothing else: no other origin, no other script."""
    hashes = {}
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        hashes[tag] = f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _content_policy(PAGE),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A node at one moment.

    Args:
        address: host:port of its gRPC API.
        status: Of the node.
        requests: In flight, the oldest first.
        others: Peers that were asked, by address.
    """

    address: str
    status: pb.NodeStatus
    requests: pb.ListRequestsResponse
    others: Mapping[str, PeerSeen] = field(default_factory=dict)


class StatusPage:
    """What the HTTP server answers with.

    Args:
        picture: Makes a picture of this moment, on the loop.
        shows_request_ids: As the clients chose them; otherwise a word that stands for each.
    """

    def __init__(self, picture: Callable[[], Awaitable[Picture]], *, shows_request_ids: bool) -> None:
        self._picture = picture
        self._shows_request_ids = shows_request_ids
        self._key = secrets.token_bytes(16)
        self._made = b""
        self._made_s = -KEPT_S
        self._making: asyncio.Task[bytes] | None = None

    async def json(self) -> bytes:
        """What the page shows now."""
        if time.monotonic() - self._made_s < KEPT_S:
            return self._made
        if self._making is None or self._making.done():
            self._making = asyncio.ensure_future(self._make())
        return await asyncio.shield(self._making)  # whoever goes away takes it from nobody else

    async def _make(self) -> bytes:
        picture = await self._picture()
        self._made = await asyncio.to_thread(self._render, picture)
        self._made_s = time.monotonic()
        return self._made

    def _render(self, picture: Picture) -> bytes:
        from transfer.registry.plain_values import plain

        now_s = time.monotonic()
        shown = picture.requests.requests[:MAX_REQUESTS]
        content = {
            "time_s": time.time(),
            "address": picture.address,
            "node": self._spared(plain(picture.status)),
            "requests": {"total": picture.requests.total, "list": [self._masked(plain(one)) for one in shown]},
            "others": [
                {
                    "address": seen.address,
                    "age_s": now_s - seen.seen_s,
                    "error": seen.error,
                    "status": None if seen.status is None else self._spared(plain(seen.status)),
                }
                for seen in picture.others.values()
            ],
        }
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()

    def _spared(self, status: dict[str, Any]) -> dict[str, Any]:
        """Without what can name a request: why a breaker has opened is the end of one, in words that may have its id."""
        sides = [status, *([other] if (other := status.get("other_side")) else [])]
        if not self._shows_request_ids:
            for side in sides:
                for peer in side["peers"]:
                    peer["breaker_reason"] = ""
        return status

    def _masked(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._shows_request_ids:
            return request
        word = hashlib.blake2b(request["request_id"].encode(), key=self._key, digest_size=4).hexdigest()
        return request | {"request_id": word, "transfer_id": ""}
