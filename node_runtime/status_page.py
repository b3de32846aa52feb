"""The status page of a node: `/`, one file that needs nothing else, and `/status.json`, its content.

The HTTP port does not know its callers. The content has no part of a prompt. A word replaces the id of each request, because the
client chose the id. The cost does not grow with the number of viewers: the content is created at most every `KEPT_S`, and encoded
as JSON outside the loop.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from node_runtime.cluster_view import ClusterView, RequestRow, Seen, view_of
from node_runtime.view_cells import (
    Badge,
    Cell,
    CellTable,
    Meter,
    Row,
    duration,
    in_bytes,
    link_table,
    number,
    ring_meter,
    state_badge,
    table_of,
)
from transfer.layer_groups import GroupKind
from transfer.registry.convert import transport_names

if TYPE_CHECKING:  # a node whose settings are wrong ends before it has loaded gRPC
    from transfer.pb import kvferry_pb2 as pb

KEPT_S: Final = 0.25
MAX_REQUESTS: Final = 100
"""Number of the oldest requests that are shown."""
MAX_LINKS: Final = 200
MAX_RINGS: Final = 16
"""Maximum number of rings that are shown for each node."""
WINDOW_S: Final = 5.0
"""Time over which the current speed of a link is averaged."""

_OTHER_ROLE: Final = {"prefill": "decode", "decode": "prefill"}

PAGE: Final = (Path(__file__).with_name("status_page.html")).read_bytes()


def _content_policy(page: bytes) -> str:
    """Return the policy that allows the page its own script, style and server, and nothing else."""
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
    others: Mapping[str, Seen] = field(default_factory=dict)


class StatusPage:
    """Create the content of the HTTP server's answers.

    Args:
        picture: Returns the current state, on the loop.
        shows_request_ids: Whether to show request ids as clients chose them; otherwise a word stands for each.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        picture: Callable[[], Awaitable[Picture]],
        *,
        shows_request_ids: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._picture = picture
        self._clock = clock
        self._shows_request_ids = shows_request_ids
        self._key = secrets.token_bytes(16)
        self._made = b""
        self._made_s = -KEPT_S
        self._making: asyncio.Task[bytes] | None = None
        self._looks: deque[tuple[float, list[Seen]]] = deque()  # looks of the last `WINDOW_S`; monotonic seconds

    async def json(self) -> bytes:
        """Return the current content."""
        if self._clock() - self._made_s < KEPT_S:
            return self._made
        if self._making is None or self._making.done():
            self._making = asyncio.ensure_future(self._make())
        return await asyncio.shield(self._making)  # a viewer that leaves does not cancel it for the others

    async def _make(self) -> bytes:
        picture = await self._picture()
        self._made = await asyncio.to_thread(self._render, picture)
        self._made_s = self._clock()
        return self._made

    def _render(self, picture: Picture) -> bytes:
        from transfer.registry.plain_values import plain

        now_s = self._clock()
        requests = picture.requests.requests[:MAX_REQUESTS]
        status = self._spared(picture.status)
        others = {
            address: seen if seen.status is None else replace(seen, status=self._spared(seen.status))
            for address, seen in picture.others.items()
        }
        own = Seen(address=picture.address, status=status, requests=tuple(requests), at_s=now_s).sides
        tiers: dict[str, list[Seen]] = {side.role: [side] for side in own}
        for side in own:
            peers = side.status.peers if side.status is not None else ()
            tiers.setdefault(_OTHER_ROLE[side.role], []).extend(_seen_by(side, peer, others) for peer in peers)
        nodes = [node for tier in tiers.values() for node in tier]
        content = {
            "time_s": time.time(),
            "address": picture.address,
            "node": plain(status),
            "requests": {"total": picture.requests.total, "list": [self._masked(plain(one)) for one in requests]},
            "others": [
                {
                    "address": seen.address,
                    "age_s": now_s - seen.at_s,
                    "error": seen.error,
                    "status": None if seen.status is None else plain(seen.status),
                }
                for seen in others.values()
            ],
            "shown": self._shown(own, tiers, view_of(nodes, self._before(nodes, now_s)), picture.requests.total),
        }
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()

    def _before(self, nodes: Iterable[Seen], now_s: float) -> list[Seen]:
        """Remember this look, and return the oldest one of each node in the window."""
        while self._looks and now_s - self._looks[0][0] > WINDOW_S:
            self._looks.popleft()
        before = {seen.key: seen for _, look in reversed(self._looks) for seen in look}
        self._looks.append((now_s, [node for node in nodes if node.status is not None]))
        return list(before.values())

    def _shown(
        self, own: Sequence[Seen], tiers: Mapping[str, Sequence[Seen]], view: ClusterView, num_requests: int
    ) -> dict[str, Any]:
        """Return the page as text, badges, meters and tables.

        Args:
            own: The sides of this node.
            tiers: All nodes by role.
            view: Their links and requests.
        """
        node = own[0]
        links = [link for link in view.links if node.address in (link.prefill, link.decode)]
        most = max(filter(math.isfinite, (link.status.bandwidth_bytes_per_s for link in links)), default=0.0)
        oldest = f", the oldest {len(view.requests)}" if num_requests > len(view.requests) else ""
        return {
            "name": f"kvferry: {node.role} {node.address}",
            "title": f"kvferry {node.role} node {node.address}",
            "state": _plain(state_badge(node.state)),
            "facts": f"version {node.version}, up {duration(node.status.uptime_s if node.status else 0.0)}",
            "tiers": {role: [_card(one, is_self=one in own) for one in tier] for role, tier in tiers.items()},
            "links": _plain_table(link_table(links[:MAX_LINKS], most_bytes_per_s=most or 1.0)),
            "more_links": max(0, len(links) - MAX_LINKS),
            "requests": _plain_table(self._request_table(view.requests)),
            "in_flight": f"Requests in flight: {num_requests:,}{oldest}",
        }

    def _request_table(self, requests: Iterable[RequestRow]) -> CellTable:
        headings = ("request", "stage", "progress", "", ">prompt", ">age", "with", ">retries")
        return table_of("requests", headings, map(self._request_row, requests))

    def _request_row(self, request: RequestRow) -> Row:
        one = request.one
        progress: tuple[Cell, Cell] = ("", "")
        if request.progress is not None:
            label, part, whole = request.progress
            progress = Meter(label=label, value=part, whole=whole), f"{label} {part:,} of {whole:,}"
        name, stage = self._name_of(one.request_id), state_badge(request.stage)
        return Row(cells=(name, stage, *progress, number(one.prompt_tokens), duration(one.age_s), one.peer, number(one.retries)))

    def _spared(self, status: pb.NodeStatus) -> pb.NodeStatus:
        """Return a copy without the reasons of breakers. Each is the failure of a request, and can contain its id."""
        copy = type(status)()
        copy.CopyFrom(status)
        if not self._shows_request_ids:
            for peer in (*copy.peers, *copy.other_side.peers):
                peer.breaker_reason = ""
        return copy

    def _masked(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._shows_request_ids:
            return request
        return request | {"request_id": self._name_of(request["request_id"]), "transfer_id": ""}

    def _name_of(self, request_id: str) -> str:
        if self._shows_request_ids:
            return request_id
        return hashlib.blake2b(request_id.encode(), key=self._key, digest_size=4).hexdigest()


def _seen_by(side: Seen, peer: pb.PeerStatus, others: Mapping[str, Seen]) -> Seen:
    """Return the side of a peer that transfers with `side`."""
    found = replace(others.get(peer.address, Seen(address=peer.address)), peer=peer).sides
    return next((one for one in found if one.role == _OTHER_ROLE[side.role]), found[0])


def _card(node: Seen, *, is_self: bool) -> dict[str, Any]:
    """Return the card of a node: badges, reasons, a line of facts, meters."""
    status, peer = node.status, node.peer
    badges = [state_badge(node.state)]
    if peer is not None and peer.breaker not in ("", "closed"):
        badges.append(state_badge(peer.breaker, f"breaker {peer.breaker}"))
    reasons = [status.not_ready_reason if status else "", (peer.reason or peer.breaker_reason) if peer else "", node.error]
    facts, meters = "", list[tuple[str, Meter | str, str]]()
    if status is not None:
        instance = status.instance
        facts = (
            f"{number(status.queued_requests)} queued, {number(status.running_requests)} running, TP {instance.shard.tp_size}, "
            f"pages of {instance.shard.page_size}, {', '.join(transport_names(instance)) or 'no transport'}, "
            f"version {node.version}, up {duration(status.uptime_s)}, {status.restarts} restarts"
        )
        meters = [*_pool_meters(status), *_staging_meters(node), *_ring_meters(status)]
    return {
        "address": node.address,
        "is_self": is_self,
        "badges": [_plain(badge) for badge in badges],
        "reasons": [reason for reason in dict.fromkeys(reasons) if reason],
        "facts": facts,
        "meters": [[name, _plain(meter), text] for name, meter, text in meters],
    }


def _pool_meters(status: pb.NodeStatus) -> Iterable[tuple[str, Meter | str, str]]:
    """Return the pages of each layer group, over all ranks."""
    for group in dict.fromkeys(pool.group for rank in status.ranks for pool in rank.pools):
        pools = [pool for rank in status.ranks for pool in rank.pools if pool.group == group]
        pages, bound, held = (sum(getattr(pool, name) for pool in pools) for name in ("pages", "bound", "reserved"))
        name = "KV pool" if group == GroupKind.FULL.value else f"KV pool, {group}"
        yield name, Meter(label=name, value=bound, whole=pages, held=held), f"{bound:,} + {held:,} of {pages:,}"


def _staging_meters(node: Seen) -> Iterable[tuple[str, Meter | str, str]]:
    if slots := node.sum("staging_slots"):
        used = node.sum("staging_slots_used")
        yield "staging", Meter(label="staging", value=used, whole=slots), f"{used:,} of {slots:,} slots"


def _ring_meters(status: pb.NodeStatus) -> Iterable[tuple[str, Meter | str, str]]:
    rings = [rank for rank in status.ranks if rank.ring_capacity]
    for rank in rings[:MAX_RINGS]:
        held = f", {in_bytes(rank.ring_quarantined_bytes)} in quarantine" if rank.ring_quarantined_bytes else ""
        text = f"{in_bytes(rank.ring_live_bytes)} of {in_bytes(rank.ring_capacity)}{held}"
        yield f"ring {rank.rank}", ring_meter(rank), text
    if len(rings) > MAX_RINGS:
        yield "", "", f"and {len(rings) - MAX_RINGS} rings more"


def _plain(cell: Cell) -> Any:
    """Return a cell as a value of JSON. NaN and infinite numbers become 0."""
    if isinstance(cell, Badge | Meter):
        values = asdict(cell)
        return {name: 0 if isinstance(one, float) and not math.isfinite(one) else one for name, one in values.items()}
    return cell


def _plain_table(table: CellTable) -> dict[str, Any]:
    return {
        "columns": [asdict(column) for column in table.columns],
        "rows": [[_plain(cell) for cell in row.cells] for row in table.rows],
    }
