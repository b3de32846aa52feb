"""`kvferry status` and `kvferry node requests`: a node's state and its requests, as tables or JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.cli.node_client import NodeClient
from kvferry.cli.text_bars import cell_text, printable, text_table
from node_runtime.cluster_view import Seen, view_of
from node_runtime.view_cells import (
    CellTable,
    Row,
    duration,
    in_bytes,
    link_table,
    number,
    ring_table,
    state_badge,
    table_of,
)
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import transport_names
from transfer.registry.plain_values import plain
from transfer.registry.security import Security

WATCH_S: Final = 0.5


async def run_status(target: str, *, security: Security | None = None, is_json: bool, is_watching: bool) -> None:
    """Print the status. Watching goes on until it is cancelled; the tables show when the node does not answer.

    Raises:
        TransferError: The node does not answer.
    """
    async with NodeClient(target, security=security) as client:
        if is_watching:
            await (_watch_json(client) if is_json else _watch(client))
        status = await client.status()
    if is_json:
        print(json.dumps(plain(status), indent=2))
    else:
        Console().print(status_tables(status, target))


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
    """Print one JSON object per line."""
    while True:
        print(json.dumps(plain(await client.status())), flush=True)
        await asyncio.sleep(WATCH_S)


def status_tables(status: pb.NodeStatus, address: str) -> RenderableType:
    """Return the tables of a node: its ranks, peers and links."""
    node = Seen(address=address, status=status).sides[0]
    parts: list[RenderableType] = [_head(node, status)]
    if status.ranks:
        parts += [text_table(one) for one in (_rank_table(status), _process_table(status), _pool_table(status))]
    if status.HasField("memory_plan"):
        parts += _memory_lines(status.memory_plan)
    if rings := [(f"rank {rank.rank}", rank) for rank in status.ranks if rank.ring_capacity]:
        parts.append(text_table(ring_table(rings)))
    if status.HasField("discovery"):
        parts += _discovery_lines(status.discovery)
    if status.peers:
        parts.append(text_table(_peer_table(status)))
    if status.links:
        parts.append(text_table(link_table(view_of([node]).links, has_use=False)))
    if any(peer.HasField("chunk_plan") for peer in status.peers):
        parts.append(text_table(_chunk_table(status)))
    if status.HasField("other_side"):
        parts.append(status_tables(status.other_side, address))
    return Group(*parts)


def _head(node: Seen, status: pb.NodeStatus) -> Text:
    text = printable(f"{node.role} node {node.address} ", "bold").append_text(cell_text(state_badge(node.state)))
    text.append(
        f"  up {duration(status.uptime_s)}, {status.queued_requests} queued, {status.running_requests} running, "
        f"{status.restarts} restarts"
    )
    if node.state == "not ready":
        text.append("\n").append_text(printable(node.reason, "yellow"))
    if status.HasField("instance"):
        shard = status.instance.shard
        lines = (
            f"incarnation {status.instance.incarnation:#018x}, TP {shard.tp_size}, pages of {shard.page_size} ({shard.order}, "
            f"{shard.dtype}), transport {', '.join(transport_names(status.instance))}, "
            f"model {status.instance.model_fingerprint}",
            f"capabilities: {', '.join(status.instance.capabilities) or 'none'}",
        )
        for line in lines:
            text.append("\n").append_text(printable(line))
    return text


def _discovery_lines(found: pb.DiscoveryStatus) -> list[Text]:
    age = f"seen {number(found.age_s)} s ago" if found.HasField("age_s") else "nothing was heard from there yet"
    lines = [printable(f"discovery: {found.where}: {len(found.addresses)} named, {age}")]
    if found.problem:
        lines.append(printable(f"looking failed: {found.problem}", "red"))
    return [*lines, *(printable(f"not used yet: {line}", "yellow") for line in found.waiting)]


def _rank_table(status: pb.NodeStatus) -> CellTable:
    headings = ("rank", ">pid", ">requests", ">sessions", ">acks", ">dropped", ">refused")
    return table_of("ranks", headings, (
        Row(cells=(str(rank.rank), str(rank.pid), *map(number, (
            rank.requests, rank.sessions, rank.watermark_acks, rank.dropped_messages, rank.refused_connections,
        )))) for rank in status.ranks
    ))  # fmt: skip


def _process_table(status: pb.NodeStatus) -> CellTable:
    """Return the machine resources of ranks, and their transfers and sessions that are active or ending."""
    headings = ("rank", ">files", ">threads", ">memory", ">pending", ">ending", ">idle checks")
    return table_of("processes", headings, (
        Row(cells=(
            str(rank.rank), number(rank.open_files), number(rank.threads), in_bytes(rank.resident_bytes),
            *map(number, (rank.pending_transfers, rank.ending_sessions, rank.idle_checks)),
        )) for rank in status.ranks
    ))  # fmt: skip


def _pool_table(status: pb.NodeStatus) -> CellTable:
    rows = []
    for rank in status.ranks:
        slots = f"{rank.staging_slots_used:,} of {rank.staging_slots:,}" if rank.staging_slots else "-"
        for index, pool in enumerate(rank.pools):
            pages = map(number, (pool.pages, pool.reserved, pool.bound))
            rows.append(Row(cells=("" if index else str(rank.rank), pool.group, *pages, "" if index else slots)))
    return table_of("pools", ("rank", "layers", ">pages", ">reserved", ">bound", ">slots used"), rows)


def _memory_lines(plan: pb.MemoryPlan) -> list[RenderableType]:
    title = f"memory of rank 0: {plan.max_total_tokens:,} tokens of {plan.cell_bytes:,} B, fraction {plan.static_fraction:.3f}"
    table = table_of(title, ("line", ">planned", ">real"), (
        Row(cells=(
            f"  {line.name}" if line.inside else line.name,
            f"{line.planned_bytes / 2**20:,.1f} MiB",
            f"{line.real_bytes / 2**20:,.1f} MiB" if line.HasField("real_bytes") else "-",
        )) for line in plan.lines
    ))  # fmt: skip
    warnings = (printable(f"warning: {warning}", "yellow") for warning in plan.warnings)
    return [text_table(table), *warnings, *(printable(f"advice: {line}") for line in plan.advice)]


def _peer_table(status: pb.NodeStatus) -> CellTable:
    """Return the peers. Only decode nodes have breakers. The reason is why a peer is not joined, or why its breaker opened."""
    has_breakers = any(peer.breaker for peer in status.peers)
    headings = ("address", "state", *(("breaker",) if has_breakers else ()), "incarnation", "reason")
    rows = []
    for peer in status.peers:
        pause = f" {peer.breaker_pause_s:.1f} s" if peer.breaker_pause_s else ""
        breaker = (state_badge(peer.breaker, f"{peer.breaker}{pause}"),) if has_breakers else ()
        unnamed = "named no longer; " if peer.is_unnamed else ""
        rows.append(Row(cells=(
            peer.address, state_badge(peer.state), *breaker, f"{peer.incarnation:#018x}" if peer.incarnation else "-",
            f"{unnamed}{peer.reason or peer.breaker_reason}".removesuffix("; "),
        )))  # fmt: skip
    return table_of("peers", headings, rows)


def _chunk_table(status: pb.NodeStatus) -> CellTable:
    """Return how requests are divided into chunks between this node and each peer."""
    rows = []
    for peer in status.peers:
        if peer.HasField("chunk_plan"):
            plan = peer.chunk_plan
            layers = number(plan.layers_per_group) if plan.layers_per_group else "all"
            rows.append(Row(cells=(peer.address, number(plan.chunk_tokens), layers, in_bytes(peer.largest_piece_bytes))))
    return table_of("chunks", ("peer", ">tokens", ">layers", ">largest piece"), rows)


def request_table(answer: pb.ListRequestsResponse, title: str) -> Table:
    """Return a row for each request, the oldest first."""
    left_out = answer.total - len(answer.requests)
    headings = ("request", "stage", "age", "with", ">prompt", ">ready", ">generated", ">ranks done", ">retries")
    rows = []
    for one in answer.requests:
        generated = f"{one.generated_tokens}/{one.max_new_tokens}" if one.max_new_tokens else "-"
        counts = (str(one.prompt_tokens), str(one.ready_tokens), generated, str(one.ranks_done), str(one.retries))
        rows.append(Row(cells=(one.request_id, state_badge(one.stage), duration(one.age_s), one.peer, *counts)))
    shown = f"{title}: {answer.total} in flight" + (f", {left_out} of them not shown" if left_out else "")
    return text_table(table_of(shown, headings, rows))
