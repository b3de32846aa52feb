"""Tables of `kvferry top`, for the live view, the plain text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvferry.cli.text_bars import printable, text_table
from kvferry.top.alerts import Alert
from node_runtime.cluster_view import ClusterView, RequestRow, Seen
from node_runtime.view_cells import (
    Cell,
    CellTable,
    Meter,
    Row,
    duration,
    link_table,
    number,
    ring_table,
    state_badge,
    table_of,
)
from transfer.registry.plain_values import plain


def tables(view: ClusterView, requests: Iterable[RequestRow] | None = None) -> dict[str, CellTable]:
    """Return the tables by title: nodes, rings, links, requests.

    Args:
        requests: Requests in the order in which they are shown; by default the oldest first.
    """
    ordered = by_age(view.requests) if requests is None else requests
    made = (_node_table(view.nodes), ring_table(view.rings), link_table(view.links, has_obstacles=True), _request_table(ordered))
    return {table.title: table for table in made}


def _node_table(nodes: Iterable[Seen]) -> CellTable:
    headings = ("tier", "node", "state", ">queued", ">running", "pool", ">", "staging", ">", ">up", "version", "reason")
    return table_of("nodes", headings, (Row(key=node.key, cells=_node_cells(node)) for node in nodes))


def _node_cells(node: Seen) -> tuple[Cell, ...]:
    state = state_badge(node.shown_state)
    if node.status is None:
        return ("", node.address, state, *("" for _ in range(8)), node.shown_reason)
    pool = _share("pool", node.sum("pool_pages_bound"), node.sum("pool_pages"))
    staging = _share("staging", node.sum("staging_slots_used"), slots) if (slots := node.sum("staging_slots")) else ("", "")
    counts = (number(node.status.queued_requests), number(node.status.running_requests))
    up = duration(node.status.uptime_s)
    return (node.role, node.address, state, *counts, *pool, *staging, up, node.version, node.shown_reason)


def _share(label: str, part: int, whole: int) -> tuple[Cell, Cell]:
    return Meter(label=label, value=part, whole=whole), f"{part:,} of {whole:,}"


def _request_table(requests: Iterable[RequestRow]) -> CellTable:
    headings = (
        "request", "stage", "computed", ">", "moved", ">", "generated", ">", ">age", "prefill", "decode", ">retries",
    )  # fmt: skip
    return table_of("requests", headings, (Row(key=request.key, cells=_request_cells(request)) for request in requests))


def _request_cells(request: RequestRow) -> tuple[Cell, ...]:
    cells: list[Cell] = [request.one.request_id, state_badge(request.stage)]
    for part, whole in (request.computed, request.moved, request.generated):
        cells += [Meter(label="", value=part, whole=whole), f"{part:,}/{whole:,}" if whole else ""]
    return (*cells, duration(request.one.age_s), request.prefill, request.decode, f"{request.one.retries or ''}")


def summary(view: ClusterView) -> str:
    """Return the view in one line."""
    tiers = ", ".join(f"{len(view.tier(role))} {role}" for role in ("prefill", "decode"))
    silent = sum(node.is_silent for node in view.nodes)
    away = sum(node.status is None and not node.late_s for node in view.nodes)
    for count, what in ((away, "unreachable"), (silent, "silent")):
        tiers += f", {count} {what}" if count else ""
    return f"{tiers}; {len(view.links)} links; {len(view.requests)} requests in flight"


def picture(view: ClusterView, alerts: Sequence[Alert]) -> RenderableType:
    """Return all tables that have rows, and all alerts, without truncation."""
    parts: list[RenderableType] = [Text(f"kvferry: {summary(view)}", style="bold")]
    parts += [text_table(table) for table in tables(view).values() if table.rows or table.title == "nodes"]
    parts += [printable(f"alert: {alert.text}", style="red" if alert.is_bad else "yellow") for alert in alerts]
    return Group(*parts)


def by_age(requests: Iterable[RequestRow]) -> list[RequestRow]:
    return sorted(requests, key=lambda request: (-request.one.age_s, request.key))


def view_to_json(view: ClusterView, alerts: Sequence[Alert]) -> dict[str, Any]:
    """Return the view for programs; statuses and requests have the field names of the wire contract."""
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
