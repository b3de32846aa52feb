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

from kvferry.cli import exit_codes
from kvferry.cli.node_client import NodeClient
from kvferry.cli.text_bars import printable
from kvferry.demo.view import ring_table
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.plain_values import plain
from transfer.registry.security import Security

WATCH_S: Final = 0.5
STYLES: Final = {
    "ready": "green",
    "joined": "green",
    "closed": "green",
    "failed": "red",
    "lost": "red",
    "open": "red",
    "alias": "dim",
}


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
                shown = printable(str(error), "red")
            live.update(shown, refresh=True)
            await asyncio.sleep(WATCH_S)


async def _watch_json(client: NodeClient) -> None:
    """One object a line."""
    while True:
        print(json.dumps(status_to_json(await client.status())), flush=True)
        await asyncio.sleep(WATCH_S)


def status_to_json(status: pb.NodeStatus) -> dict[str, Any]:
    """Every field under its name in the wire contract, also those that are 0; see `transfer.registry.plain_values`."""
    return plain(status)


def status_tables(status: pb.NodeStatus, address: str) -> RenderableType:
    """The node, its ranks, its peers and its links."""
    parts: list[RenderableType] = [_head(status, address)]
    if status.ranks:
        parts += [_rank_table(status), _process_table(status), _pool_table(status)]
    if status.HasField("memory_plan"):
        parts.append(_memory_table(status.memory_plan))
    if any(rank.ring_capacity for rank in status.ranks):
        parts.append(ring_table(status))
    if status.HasField("discovery"):
        parts.append(_discovery_lines(status.discovery))
    if status.peers:
        parts.append(_peer_table(status))
    if status.links:
        parts.append(_link_table(status))
    if cut := [peer for peer in status.peers if peer.HasField("chunk_plan")]:
        parts.append(_chunk_table(cut))
    if status.HasField("other_side"):
        parts.append(status_tables(status.other_side, address))
    return Group(*parts)


def _head(status: pb.NodeStatus, address: str) -> Text:
    shard = status.instance.shard
    is_idle = status.state == "ready" and not status.ready  # its ranks are there, but it can serve nobody
    state = "not ready" if is_idle else status.state
    text = Text.assemble((f"{status.role} node {address} ", "bold"), (state, STYLES.get(state, "yellow")))
    text.append(
        f"  up {status.uptime_s:,.0f} s, {status.queued_requests} queued, {status.running_requests} running, "
        f"{status.restarts} restarts"
    )
    if is_idle:
        text.append("\n").append_text(printable(status.not_ready_reason, "yellow"))
    if status.HasField("instance"):
        text.append(
            f"\nincarnation {status.instance.incarnation:#018x}, TP {shard.tp_size}, pages of {shard.page_size} ({shard.order}, "
            f"{shard.dtype}), transport {status.instance.transport}, model {status.instance.model_fingerprint}"
        )
        text.append(f"\ncapabilities: {', '.join(status.instance.capabilities) or 'none'}")
    return text


def _discovery_lines(found: pb.DiscoveryStatus) -> Text:
    age = f"seen {found.age_s:,.0f} s ago" if found.HasField("age_s") else "nothing was heard from there yet"
    text = printable(f"discovery: {found.where}: {len(found.addresses)} named, {age}")
    if found.problem:
        text.append("\n").append_text(printable(f"looking failed: {found.problem}", "red"))
    for line in found.waiting:
        text.append("\n").append_text(printable(f"not used yet: {line}", "yellow"))
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
            table.add_row("" if index else str(rank.rank), printable(pool.group), *pages, "" if index else slots)
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
    return Group(table, *(printable(line, style) for line, style in said))


def _peer_table(status: pb.NodeStatus) -> Table:
    """Breakers are a decode node's; the reason is why the peer is not joined, or else why its breaker opened."""
    has_breakers = any(peer.breaker for peer in status.peers)
    headings = ("address", "state", *(("breaker",) if has_breakers else ()), "incarnation", "reason")
    table = _table("peers", *headings, num_left=len(headings))
    for peer in status.peers:
        cells = [printable(peer.address), printable(peer.state, STYLES.get(peer.state, "yellow"))]
        if has_breakers:
            pause = f" {peer.breaker_pause_s:.1f} s" if peer.breaker_pause_s else ""
            cells.append(printable(f"{peer.breaker}{pause}", STYLES.get(peer.breaker, "yellow")))
        cells.append(Text(f"{peer.incarnation:#018x}" if peer.incarnation else "-"))
        unnamed = "named no longer; " if peer.is_unnamed else ""
        table.add_row(*cells, printable(f"{unnamed}{peer.reason or peer.breaker_reason}".removesuffix("; ")))
    return table


def _chunk_table(peers: list[pb.PeerStatus]) -> Table:
    """How requests are cut between this node and each peer."""
    table = _table("chunks", "peer", "tokens", "layers", "largest piece")
    for peer in peers:
        plan = peer.chunk_plan
        layers = f"{plan.layers_per_group:,}" if plan.layers_per_group else "all"
        table.add_row(printable(peer.address), f"{plan.chunk_tokens:,}", layers, f"{peer.largest_piece_bytes / 2**20:,.2f} MiB")
    return table


def _link_table(status: pb.NodeStatus) -> Table:
    table = _table("links", "prefill rank -> decode rank", "lane", "latency", "bandwidth", num_left=2)
    for link in sorted(status.links, key=lambda one: (one.prefill_rank, one.decode_rank)):
        bandwidth = f"{link.bandwidth_bytes_per_s / 1e9:,.2f} GB/s"
        table.add_row(
            f"{link.prefill_rank} -> {link.decode_rank}", printable(link.lane), f"{link.latency_s * 1e6:,.0f} us", bandwidth
        )
    return table
