"""The demo's report, computed from the nodes' reports.

The bytes and pages of each group of layers are computed from both tiers' geometry and the lengths of the requests. The senders
count the same bytes. A page count larger than a pool means that its pages were used again. A request gets every page of its
tables before it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvferry.bench_serve.summary import Spread
from kvferry.demo.offload import OffloadReport, PrefillOffloadReport
from kvferry.demo.reference import ReferenceResult
from kvferry.demo.sparse import SparseReport
from transfer.layer_groups import GroupKind, LayerGroup, layer_groups
from transfer.layout import KVLayout, LayerKind, Range, Shard, routes, wire_buffers, wire_dtype
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import instance_from_proto

_KEPT: Final = {LayerKind.MLA: "latent", LayerKind.RECURRENT_STATE: "state"}


@dataclass(slots=True, kw_only=True, eq=False)
class DemoRequest:
    """One request, updated by each event.

    Args:
        number: Number of the request, from 1.
        prompt_tokens: Number that the decode node counted; 0 until it has accepted the request.
        token_ids, text: Output so far.
        state: "queued", "accepted", "generating", "done" or "failed".
        done: The last event.
        error: One line.
    """

    number: int = 1
    max_new_tokens: int = 1
    prompt: str = ""
    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    state: str = "queued"
    done: pb.GenerateDone | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One group of layers that share pages. Field names are those of ``--json``.

    Args:
        name: For example ``full``, ``window_64`` or ``state``.
        keeps: "K or V" or a "latent" of a token, or the "state" of a request.
        prefill_pages, decode_pages: Pages of each rank's pool.
        prefill_pages_used, decode_pages_used: Pages that all requests used, one after the other.
        tokens_sent: Tokens of the prompts that were sent; for states, the number of states.
        tokens_left_out: Tokens of the prompts that were not sent, because decode does not read them.
        bytes_sent: Bytes over all pairs of ranks, without chunks that were sent again.
    """

    name: str
    keeps: str
    layers: int
    prefill_pages: int
    decode_pages: int
    prefill_pages_used: int
    decode_pages_used: int
    tokens_sent: int
    tokens_left_out: int
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Outcome of a run. Field names are those of ``--json``.

    Args:
        failed: Requests that ended in an error, either before (`refusals`) or after (`failures`) they were accepted.
        compared: Requests whose tokens were compared. If a request fails, the run does not wait for the single process.
        tokens_match: Every token of every request, and the length of each prompt, matches the single process.
        bytes_moved: Payload, resent chunks included.
        writes_without_staging: Writes that one write for each token, layer and K/V slice of each route would have needed.
        transport: Lanes of all links, as measured at attach.
        links: Number of (prefill rank, decode rank) links.
        link_bandwidth_bytes_per_s: Median over the links, as measured at attach.
        transfer_seconds: Time from the first gather, while later chunks are still computed, to the last release.
        exposed_seconds: Its part after the last chunk was computed.
        ttft_seconds: Time from acceptance to the first token.
        overlap_ratio: Share of the transfer time during which the prompt was still computed; 0 without transfers.
        ring_peak_bytes: Highest occupancy of any decode rank's ring; its capacity once grants had to wait.
        watermark_acks: Acks of all decode ranks, heartbeats included.
        leaked: Resources that are still held, one line each; `leaks` is their number.
        mismatches: Requests whose tokens differ or that failed, one line each.
        seconds: Duration of the run, from the command's start to the last process's end.
        generate_seconds: Its part from the first request to the last token.
        dtype: Type in which both tiers and the single process computed.
        model_kind: Kind of the demo model, or the architecture of the given model.
        groups: Groups of layers; empty with `offload`, because then not all KV travels.
        offload: None without storage tiers.
        prefill_offload: None if all KV of the prefill tier lies on its devices.
        sparse: None with full attention.
        draft_tokens, accepted_tokens: Draft tokens of the decode tier's steps, and those that were accepted.
    """

    requests: int
    failed: int
    refusals: tuple[str, ...]
    failures: tuple[str, ...]
    compared: int
    tokens_match: bool
    prompt_tokens: int
    generated_tokens: int
    bytes_moved: int
    writes: int
    writes_without_staging: int
    resends: int
    transport: str
    links: int
    link_bandwidth_bytes_per_s: float
    transfer_seconds: Mapping[str, float]
    exposed_seconds: Mapping[str, float]
    ttft_seconds: Mapping[str, float]
    overlap_ratio: float
    ring_peak_bytes: int
    watermark_acks: int
    leaks: int
    leaked: tuple[str, ...]
    mismatches: tuple[str, ...]
    seconds: float
    generate_seconds: float
    dtype: str
    model_kind: str = ""
    groups: tuple[GroupReport, ...] = ()
    offload: OffloadReport | None = None
    prefill_offload: PrefillOffloadReport | None = None
    sparse: SparseReport | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_success(self) -> bool:
        may_differ = self.sparse is not None and not self.sparse.is_exact
        if self.sparse is not None and not self.sparse.is_plausible:
            return False
        return (self.tokens_match or may_differ) and not self.failed and not self.leaks

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return dataclasses.asdict(self)


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    spread = Spread.of(seconds)
    return {"p50": spread.p50, "p99": spread.p99}


def make_report(
    outcomes: Sequence[DemoRequest],
    reference: Sequence[ReferenceResult | None],
    *,
    decode: pb.NodeStatus,
    leaked: Sequence[str],
    seconds: float,
    generate_seconds: float,
    dtype: str,
    environment: Mapping[str, Any],
    model_kind: str = "",
    prefill: pb.NodeStatus | None = None,
    offload: OffloadReport | None = None,
    prefill_offload: PrefillOffloadReport | None = None,
    sparse: SparseReport | None = None,
    draft_tokens: int = 0,
    accepted_tokens: int = 0,
) -> DemoReport:
    """Add up a run. Arguments that are fields of the report are described there.

    Args:
        reference: Results of a single process for the same prompts, in the same order; None if the run did not wait for it.
        decode: The decode node's status after the last request.
        prefill: The prefill node's status; None leaves out the groups of layers.
    """
    mismatches = find_mismatches(outcomes, reference)
    dones = [outcome.done for outcome in outcomes if outcome.done is not None]
    transfer_s = [done.stats.transfer_s for done in dones]
    exposed_s = [done.stats.exposed_s for done in dones]
    return DemoReport(
        requests=len(outcomes),
        failed=len(outcomes) - len(dones),
        refusals=_errors(outcomes, after_acceptance=False),
        failures=_errors(outcomes, after_acceptance=True),
        compared=sum(one.done is not None and wanted is not None for one, wanted in zip(outcomes, reference, strict=True)),
        tokens_match=not mismatches,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
        generated_tokens=sum(len(outcome.token_ids) for outcome in outcomes),
        bytes_moved=sum(done.stats.bytes for done in dones),
        writes=sum(done.stats.writes for done in dones),
        writes_without_staging=sum(done.stats.writes_without_staging for done in dones),
        resends=sum(done.stats.resends for done in dones),
        transport=", ".join(sorted({link.lane for link in decode.links})),
        links=len(decode.links),
        link_bandwidth_bytes_per_s=Spread.of(link.bandwidth_bytes_per_s for link in decode.links).p50,
        transfer_seconds=percentiles(transfer_s),
        exposed_seconds=percentiles(exposed_s),
        ttft_seconds=percentiles([done.ttft_s for done in dones]),
        overlap_ratio=1 - sum(exposed_s) / sum(transfer_s) if sum(transfer_s) else 0.0,
        ring_peak_bytes=max((rank.ring_peak_bytes for rank in decode.ranks), default=0),
        watermark_acks=sum(rank.watermark_acks for rank in decode.ranks),
        leaks=len(leaked),
        leaked=tuple(leaked),
        mismatches=tuple(mismatches),
        seconds=seconds,
        generate_seconds=generate_seconds,
        dtype=dtype,
        model_kind=model_kind,
        groups=() if prefill is None else group_reports(prefill, decode, [one for one in outcomes if one.done]),
        offload=offload,
        prefill_offload=prefill_offload,
        sparse=sparse,
        draft_tokens=draft_tokens,
        accepted_tokens=accepted_tokens,
        environment=dict(environment),
    )


def _errors(outcomes: Sequence[DemoRequest], *, after_acceptance: bool) -> tuple[str, ...]:
    return tuple(
        f"request {number}: {outcome.error}"
        for number, outcome in enumerate(outcomes, start=1)
        if outcome.error and (outcome.prompt_tokens > 0) is after_acceptance
    )


def find_mismatches(outcomes: Sequence[DemoRequest], reference: Sequence[ReferenceResult | None]) -> list[str]:
    """Return one line for each request that failed or differs from the reference, in order."""
    differences = (_difference(outcome, wanted) for outcome, wanted in zip(outcomes, reference, strict=True))
    return [f"request {number}: {difference}" for number, difference in enumerate(differences, start=1) if difference]


def _difference(outcome: DemoRequest, wanted: ReferenceResult | None) -> str:
    if outcome.error or wanted is None:
        return outcome.error
    if outcome.prompt_tokens != wanted.prompt_tokens:
        return f"its prompt has {outcome.prompt_tokens} tokens, and {wanted.prompt_tokens} in a single process"
    pairs = zip(outcome.token_ids, wanted.token_ids, strict=False)
    for position, (token, wanted_token) in enumerate(pairs):
        if token != wanted_token:
            return f"generated token {position + 1} is {token}, and {wanted_token} in a single process"
    if len(outcome.token_ids) != len(wanted.token_ids):
        return f"it has {len(outcome.token_ids)} tokens, and {len(wanted.token_ids)} in a single process"
    return ""


def find_leaks(status: pb.NodeStatus, *, name: str = "") -> list[str]:
    """Return the resources that an idle node still holds, one line each; empty means none.

    Args:
        name: Name of the node; by default its role.
    """
    node = name or status.role
    lines = [
        f"{node} node: {field} is {getattr(status, field)}"
        for field in ("queued_requests", "running_requests")
        if getattr(status, field)
    ]
    held = (
        "pool_pages_reserved", "pool_pages_bound", "ring_live_bytes", "ring_live_grants", "ring_quarantined_bytes",
        "pending_transfers", "ending_sessions",
        "staging_slots_used", "requests",
    )  # fmt: skip
    for rank in status.ranks:
        lines += [f"{node} rank {rank.rank}: {field} is {getattr(rank, field)}" for field in held if getattr(rank, field)]
    return lines


def group_reports(prefill: pb.NodeStatus, decode: pb.NodeStatus, requests: Sequence[DemoRequest]) -> tuple[GroupReport, ...]:
    """Return a report for each group of the model; none if a node has no ranks. `requests` are those that succeeded."""
    if not (prefill.HasField("instance") and decode.HasField("instance") and prefill.ranks and decode.ranks):
        return ()
    source, target = instance_from_proto(prefill.instance), instance_from_proto(decode.instance)
    layout = target.layout
    pages = [{pool.group: pool.pages for pool in node.ranks[0].pools} for node in (prefill, decode)]
    found: list[GroupReport] = []
    for group in layer_groups(layout):
        sent, left_out = 0, 0
        for request in requests:
            first = group.first_travelling_token(request.prompt_tokens)
            sent += 1 if group.kind is GroupKind.STATE else request.prompt_tokens - first
            left_out += request.prompt_tokens if group.kind is GroupKind.STATE else first
        found.append(
            GroupReport(
                name=group.name,
                keeps=_KEPT.get(layout.layers[group.layers[0]].kind, "K or V"),
                layers=len(group.layers),
                prefill_pages=pages[0].get(group.name, 0),
                decode_pages=pages[1].get(group.name, 0),
                prefill_pages_used=sum(group.num_pages(one.prompt_tokens, source.shard.page_size) for one in requests),
                decode_pages_used=sum(_decode_pages(group, target.shard.page_size, one) for one in requests),
                tokens_sent=sent,
                tokens_left_out=left_out,
                bytes_sent=sum(_bytes_sent(group, layout, source.shard, target.shard, one.prompt_tokens) for one in requests),
            )
        )
    return tuple(found)


def _decode_pages(group: LayerGroup, page_size: int, request: DemoRequest) -> int:
    computed = request.prompt_tokens + len(request.token_ids) - 1  # nothing is computed from the last token
    return group.num_pages(computed, page_size) - group.first_travelling_token(request.prompt_tokens) // page_size


def _bytes_sent(group: LayerGroup, layout: KVLayout, prefill: Shard, decode: Shard, num_tokens: int) -> int:
    dtype = wire_dtype(layout, prefill, decode)
    whole = Range(begin=0, end=num_tokens)
    layers = Range(begin=0, end=layout.num_layers)
    return sum(
        buffer.num_bytes
        for route in routes(layout, prefill, decode)
        for buffer in wire_buffers(layout, route, tokens=whole, layers=layers, num_tokens=num_tokens, dtype=dtype)
        if buffer.layer in group.layers
    )
