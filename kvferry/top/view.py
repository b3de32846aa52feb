"""What `kvferry top` shows, as rich tables: one plain picture, and the cells that the live one is made of too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvferry.cli.status_view import STYLES
from kvferry.cli.text_bars import bar, printable, ring_bar
from kvferry.demo.view import in_bytes
from kvferry.top.cluster_view import SLOW_SHARE, Alert, ClusterView, LinkView, RequestRow, Seen
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.plain_values import plain

RING_COLUMNS: Final = 24
BAR_COLUMNS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of one of the tables; `is_right` for numbers."""

    title: str
    is_right: bool = False


def _columns(*titles: str) -> tuple[Column, ...]:
    """Of those that begin with a ``>`` the cells are at the right."""
    return tuple(Column(title=title.removeprefix(">"), is_right=title.startswith(">")) for title in titles)


NODES: Final = _columns(
    "tier", "node", "state", ">queued", ">running", "pool", ">", "staging", ">", ">up", "version", "reason"
)  # fmt: skip
RINGS: Final = _columns("ring", "from the watermark on", ">live", ">of", ">watermark", ">quarantine")
LINKS: Final = _columns("from prefill rank", "to decode rank", "lane", ">latency", ">probe", "now", ">", ">of probe")
REQUESTS: Final = _columns(
    "request", "stage", "computed", ">", "moved", ">", "generated", ">", ">age", "prefill", "decode", ">retries"
)  # fmt: skip


def node_cells(node: Seen) -> list[Text]:
    is_away = node.status is None and not node.late_s
    state = printable(node.shown_state, style=STYLES.get(node.shown_state, "red" if is_away else "yellow"))
    if node.status is None:
        return [Text(""), printable(node.address), state, *(Text("") for _ in range(8)), printable(node.shown_reason)]
    status = node.status
    pages, bound = (sum(getattr(rank, name) for rank in status.ranks) for name in ("pool_pages", "pool_pages_bound"))
    slots, used = (sum(getattr(rank, name) for rank in status.ranks) for name in ("staging_slots", "staging_slots_used"))
    return [
        printable(node.role),
        printable(node.address),
        state,
        Text(f"{status.queued_requests:,}"),
        Text(f"{status.running_requests:,}"),
        bar(bound, pages, width=BAR_COLUMNS),
        Text(f"{bound:,} of {pages:,}"),
        bar(used, slots, width=BAR_COLUMNS) if slots else Text(""),
        Text(f"{used:,} of {slots:,}" if slots else ""),
        Text(age(status.uptime_s)),
        printable(status.version or status.instance.version),
        printable(node.shown_reason),
    ]


def ring_cells(node: Seen, rank: pb.RankStatus) -> list[Text]:
    quarantined = Text(in_bytes(rank.ring_quarantined_bytes) if rank.ring_quarantined_bytes else "", style="yellow")
    return [
        printable(f"{node.address} #{rank.rank}"),
        ring_bar(live=rank.ring_live_bytes, capacity=rank.ring_capacity, watermark=rank.watermark_position, width=RING_COLUMNS),
        Text(in_bytes(rank.ring_live_bytes)),
        Text(in_bytes(rank.ring_capacity)),
        Text(f"{rank.watermark_position:,}"),
        quarantined,
    ]


def link_cells(link: LinkView) -> list[Text]:
    probe, now = link.status.bandwidth_bytes_per_s, link.now_bytes_per_s
    style = "yellow" if link.share is not None and link.share < SLOW_SHARE else "blue"
    return [
        printable(f"{link.prefill} #{link.status.prefill_rank}"),
        printable(f"{link.decode} #{link.status.decode_rank}"),
        printable(link.status.lane),
        Text(f"{link.status.latency_s * 1e6:,.0f} us"),
        Text(f"{probe / 1e9:,.2f} GB/s"),
        bar(link.share or 0.0, 1.0, width=BAR_COLUMNS, style=style),
        Text("not known" if now is None else f"{now / 1e9:,.2f} GB/s" if now else "idle", style="" if now else "dim"),
        Text("" if link.share is None else f"{link.share:.2f}", style=style),
    ]


def request_cells(request: RequestRow) -> list[Text]:
    one = request.one
    cells = [printable(one.request_id), printable(request.stage, style="yellow" if request.stage == "queued" else "")]
    for part, whole in (request.computed, request.moved, request.generated):
        cells += [bar(part, whole, width=BAR_COLUMNS), Text(f"{part:,}/{whole:,}" if whole else "")]
    return [*cells, Text(age(one.age_s)), printable(request.prefill), printable(request.decode), Text(f"{one.retries or ''}")]


def rings_of(view: ClusterView) -> Iterable[tuple[Seen, pb.RankStatus]]:
    for node in view.nodes:
        for rank in node.status.ranks if node.status is not None else ():
            if rank.ring_capacity:
                yield node, rank


def age(seconds: float) -> str:
    """For people, short."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def summary(view: ClusterView) -> str:
    """In one line."""
    tiers = ", ".join(f"{len(view.tier(role))} {role}" for role in ("prefill", "decode"))
    silent = sum(node.is_silent for node in view.nodes)
    away = sum(node.status is None and not node.late_s for node in view.nodes)
    for number, what in ((away, "unreachable"), (silent, "silent")):
        tiers += f", {number} {what}" if number else ""
    return f"{tiers}; {len(view.links)} links; {len(view.requests)} requests in flight"


def picture(view: ClusterView, alerts: Sequence[Alert]) -> RenderableType:
    """All of it, once; nothing is cut off."""
    parts: list[RenderableType] = [Text(f"kvferry: {summary(view)}", style="bold")]
    parts.append(_table("nodes", NODES, (node_cells(node) for node in view.nodes)))
    if rings := [ring_cells(node, rank) for node, rank in rings_of(view)]:
        parts.append(_table("rings", RINGS, rings))
    if view.links:
        parts.append(_table("links", LINKS, map(link_cells, view.links)))
    if view.requests:
        parts.append(_table("requests", REQUESTS, map(request_cells, by_age(view.requests))))
    parts += [printable(f"alert: {alert.text}", style="red" if alert.is_bad else "yellow") for alert in alerts]
    return Group(*parts)


def by_age(requests: Iterable[RequestRow]) -> list[RequestRow]:
    return sorted(requests, key=lambda request: (-request.one.age_s, request.key))


def _table(title: str, columns: Sequence[Column], rows: Iterable[Sequence[Text]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.title, justify="right" if column.is_right else "left", overflow="fold", no_wrap=column.is_right)
    for row in rows:
        table.add_row(*row)
    return table


def view_to_json(view: ClusterView, alerts: Sequence[Alert]) -> dict[str, Any]:
    """The same for programs; statuses and requests as the wire contract names their fields."""
    return {
        "nodes": [
            {
                "address": node.address,
                "error": node.error,
                "status": None if node.status is None else plain(node.status),
                "requests": [plain(one) for one in node.requests],
            }
            for node in view.nodes
        ],
        "links": [
            {
                "prefill": link.prefill,
                "decode": link.decode,
                "now_bytes_per_s": link.now_bytes_per_s,
                "share_of_probe": link.share,
                **plain(link.status),
            }
            for link in view.links
        ],
        "alerts": [{"what": alert.what, "text": alert.text, "is_bad": alert.is_bad} for alert in alerts],
    }
