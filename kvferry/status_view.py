"""`kvferry status`: a node's state as tables or JSON, once or again and again."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry import exit_codes
from kvferry.demo_view import ring_table
from kvferry.node_client import NodeClient
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import Security

WATCH_S: Final = 0.5
_STYLES: Final = {"ready": "green", "joined": "green", "closed": "green", "failed": "red", "lost": "red", "open": "red"}


async def run_status(target: str, *, security: Security | None = None, is_json: bool, is_watching: bool) -> int:
    """Print it; returns the exit code. Watching, it goes on until it is cancelled, and shows when the node does not answer."""
    try:
        async with NodeClient(target, security=security) as client:
            if is_watching:
                await (_watch_json(client) if is_json else _watch(client))
            status = await client.status()
    except TransferError as error:
        print(f"kvferry status: {error}", file=sys.stderr)
        return exit_codes.exit_code_of(error)
    if is_json:
        print(json.dumps(status_to_json(status), indent=2))
    else:
        Console().print(status_tables(status, target))
    return exit_codes.OK


async def _watch(client: NodeClient) -> None:
    with Live(Text("..."), console=Console(), auto_refresh=False) as live:
        while True:
            shown: RenderableType
            try:
                shown = status_tables(await client.status(), client.address)
            except TransferError as error:
                shown = Text(str(error), style="red")
            live.update(shown, refresh=True)
            await asyncio.sleep(WATCH_S)


async def _watch_json(client: NodeClient) -> None:
    """One object a line."""
    while True:
        print(json.dumps(status_to_json(await client.status())), flush=True)
        await asyncio.sleep(WATCH_S)


def status_to_json(status: pb.NodeStatus) -> dict[str, Any]:
    """Every field under its name in the wire contract, also those that are 0; incarnations as text, 0x and 16 hex digits."""
    instance = status.instance
    names = (
        "role", "state", "ready", "not_ready_reason", "uptime_s", "queued_requests", "running_requests", "restarts",
    )  # fmt: skip
    content: dict[str, Any] = {name: getattr(status, name) for name in names}
    content["instance"] = {
        "incarnation": f"{instance.incarnation:#018x}",
        "version": instance.version,
        "layout_fingerprint": instance.layout_fingerprint,
        "model_fingerprint": instance.model_fingerprint,
        "model_fields": dict(instance.model_fields),
        "shard": _fields(instance.shard) | {"stage_layers": list(instance.shard.stage_layers)},
        "transport": instance.transport,
        "digests": list(instance.digests),
        "protocol_versions": list(instance.protocol_versions),
        "capabilities": list(instance.capabilities),
    }
    content["memory_plan"] = None
    if status.HasField("memory_plan"):
        plan = status.memory_plan
        content["memory_plan"] = {
            **_fields(plan),
            "lines": [_fields(line) | {"real_bytes": _real_bytes(line)} for line in plan.lines],
            "advice": list(plan.advice),
            "warnings": list(plan.warnings),
        }
    content["ranks"] = [_fields(rank) | {"pools": [_fields(pool) for pool in rank.pools]} for rank in status.ranks]
    content["peers"] = [
        _fields(peer)
        | {
            "incarnation": f"{peer.incarnation:#018x}",
            "chunk_plan": _fields(peer.chunk_plan) if peer.HasField("chunk_plan") else None,
        }
        for peer in status.peers
    ]
    content["links"] = [_fields(link) for link in status.links]
    return content


def _real_bytes(line: pb.MemoryLine) -> int | None:
    return line.real_bytes if line.HasField("real_bytes") else None


_REPEATED = ("stage_layers", "pools", "lines", "advice", "warnings")


def _fields(message: Any) -> dict[str, Any]:
    """All single-valued fields of a flat message."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if field.name not in _REPEATED}


def status_tables(status: pb.NodeStatus, address: str) -> RenderableType:
    """The node, its ranks, its peers and its links."""
    parts: list[RenderableType] = [_head(status, address)]
    if status.ranks:
        parts += [_rank_table(status), _process_table(status), _pool_table(status)]
    if status.HasField("memory_plan"):
        parts.append(_memory_table(status.memory_plan))
    if any(rank.ring_capacity for rank in status.ranks):
        parts.append(ring_table(status))
    if status.peers:
        parts.append(_peer_table(status))
    if status.links:
        parts.append(_link_table(status))
    if cut := [peer for peer in status.peers if peer.HasField("chunk_plan")]:
        parts.append(_chunk_table(cut))
    return Group(*parts)


def _head(status: pb.NodeStatus, address: str) -> Text:
    shard = status.instance.shard
    is_idle = status.state == "ready" and not status.ready  # its ranks are there, but it can serve nobody
    state = "not ready" if is_idle else status.state
    text = Text.assemble((f"{status.role} node {address} ", "bold"), (state, _STYLES.get(state, "yellow")))
    text.append(
        f"  up {status.uptime_s:,.0f} s, {status.queued_requests} queued, {status.running_requests} running, "
        f"{status.restarts} restarts"
    )
    if is_idle:
        text.append(f"\n{status.not_ready_reason}", "yellow")
    if status.HasField("instance"):
        text.append(
            f"\nincarnation {status.instance.incarnation:#018x}, TP {shard.tp_size}, pages of {shard.page_size} ({shard.order}, "
            f"{shard.dtype}), transport {status.instance.transport}, model {status.instance.model_fingerprint}"
        )
        text.append(f"\ncapabilities: {', '.join(status.instance.capabilities) or 'none'}")
    return text


def _table(title: str, *headings: str, num_left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < num_left else "right", overflow="fold")  # nothing is cut off
    return table


def _rank_table(status: pb.NodeStatus) -> Table:
    table = _table("ranks", "rank", "pid", "requests", "sessions", "acks", "dropped", "refused")
    for rank in status.ranks:
        counts = (rank.requests, rank.sessions, rank.watermark_acks, rank.dropped_messages, rank.refused_connections)
        table.add_row(str(rank.rank), str(rank.pid), *(f"{one:,}" for one in counts))
    return table


def _process_table(status: pb.NodeStatus) -> Table:
    """What the ranks hold of their machine, and of transfers and sessions that are under way or ending."""
    table = _table("processes", "rank", "files", "threads", "memory", "pending", "ending", "idle checks")
    for rank in status.ranks:
        counts = (rank.pending_transfers, rank.ending_sessions, rank.idle_checks)
        memory = f"{rank.resident_bytes / 2**20:,.0f} MiB"
        table.add_row(str(rank.rank), f"{rank.open_files:,}", f"{rank.threads:,}", memory, *(f"{one:,}" for one in counts))
    return table


def _pool_table(status: pb.NodeStatus) -> Table:
    table = _table("pools", "rank", "layers", "pages", "reserved", "bound", "slots used", num_left=2)
    for rank in status.ranks:
        slots = f"{rank.staging_slots_used:,} of {rank.staging_slots:,}" if rank.staging_slots else "-"
        for index, pool in enumerate(rank.pools):
            pages = (f"{one:,}" for one in (pool.pages, pool.reserved, pool.bound))
            table.add_row("" if index else str(rank.rank), pool.group, *pages, "" if index else slots)
    return table


def _memory_table(plan: pb.MemoryPlan) -> RenderableType:
    table = _table(
        f"memory of rank 0: {plan.max_total_tokens:,} tokens of {plan.cell_bytes:,} B, fraction {plan.static_fraction:.3f}",
        "line", "planned", "real",
    )  # fmt: skip
    for line in plan.lines:
        name = f"  {line.name}" if line.inside else line.name
        real = f"{line.real_bytes / 2**20:,.1f} MiB" if line.HasField("real_bytes") else "-"
        table.add_row(name, f"{line.planned_bytes / 2**20:,.1f} MiB", real)
    said = [(f"warning: {warning}", "yellow") for warning in plan.warnings] + [(f"advice: {line}", "") for line in plan.advice]
    return Group(table, *(Text(line, style=style) for line, style in said))


def _peer_table(status: pb.NodeStatus) -> Table:
    """Breakers are a decode node's; the reason is why the peer is not joined, or else why its breaker opened."""
    has_breakers = any(peer.breaker for peer in status.peers)
    headings = ("address", "state", *(("breaker",) if has_breakers else ()), "incarnation", "reason")
    table = _table("peers", *headings, num_left=len(headings))
    for peer in status.peers:
        cells = [Text(peer.address), Text(peer.state, style=_STYLES.get(peer.state, "yellow"))]
        if has_breakers:
            pause = f" {peer.breaker_pause_s:.1f} s" if peer.breaker_pause_s else ""
            cells.append(Text(f"{peer.breaker}{pause}", style=_STYLES.get(peer.breaker, "yellow")))
        cells.append(Text(f"{peer.incarnation:#018x}" if peer.incarnation else "-"))
        table.add_row(*cells, Text(peer.reason or peer.breaker_reason))
    return table


def _chunk_table(peers: list[pb.PeerStatus]) -> Table:
    """How requests are cut between this node and each peer."""
    table = _table("chunks", "peer", "tokens", "layers", "largest piece")
    for peer in peers:
        plan = peer.chunk_plan
        layers = f"{plan.layers_per_group:,}" if plan.layers_per_group else "all"
        table.add_row(Text(peer.address), f"{plan.chunk_tokens:,}", layers, f"{peer.largest_piece_bytes / 2**20:,.2f} MiB")
    return table


def _link_table(status: pb.NodeStatus) -> Table:
    table = _table("links", "prefill rank -> decode rank", "lane", "latency", "bandwidth", num_left=2)
    for link in sorted(status.links, key=lambda one: (one.prefill_rank, one.decode_rank)):
        bandwidth = f"{link.bandwidth_bytes_per_s / 1e9:,.2f} GB/s"
        table.add_row(f"{link.prefill_rank} -> {link.decode_rank}", link.lane, f"{link.latency_s * 1e6:,.0f} us", bandwidth)
    return table
