"""The demo's report: arithmetic over what the nodes said, as values, as JSON and as lines of text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.demo.groups import GroupReport, RequestLengths, group_reports
from kvferry.demo.offload import OffloadReport
from kvferry.demo.reference_generate import ReferenceResult
from transfer.errors import ConfigError
from transfer.pb import kvferry_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """What came of one request. Exactly one of `done` and `error` is there.

    Args:
        prompt_tokens: As the decode node counted them; 0 if it never accepted the request.
        token_ids: What it generated.
        done: The last event.
        error: One line.
    """

    prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    done: pb.GenerateDone | None = None
    error: str = ""

    def __post_init__(self) -> None:
        if (self.done is None) == (not self.error):
            raise ConfigError(f"outcome has done={self.done is not None} and error={self.error!r}; exactly one must be there")


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """What a run moved, how long it took, and whether it was right. Field names are those of ``--json``.

    Args:
        requests: Requests that were sent.
        failed: Of them, those that ended in an error.
        refusals: Why some of these were never accepted, one line each.
        failures: Why the others of these ended, one line each.
        compared: Requests whose tokens were compared; where one failed, the single process is not waited for.
        tokens_match: Whether every token of every request, and each prompt's length, is what a single process made.
        prompt_tokens, generated_tokens: Sums.
        bytes_moved: Payload, resent chunks included.
        writes: Bulk writes.
        writes_without_staging: Writes that each token x layer x K/V slice of each route by itself would have taken.
        resends: Chunks that were sent again.
        transport: Lanes of all links, as measured at attach.
        links: Number of (prefill rank, decode rank) links.
        link_bandwidth_bytes_per_s: Median over the links, as measured at attach.
        transfer_seconds: First gather, while later chunks are still being computed, to last release.
        exposed_seconds: What of it came after the last chunk had been computed.
        ttft_seconds: Acceptance to first token.
        overlap_ratio: Share of the transfer time during which the prompt was still being computed; 0 without transfers.
        ring_peak_bytes: The fullest that any decode rank's ring was; its capacity once grants had to wait for room.
        watermark_acks: Sent by all decode ranks, heartbeats included.
        leaks: Things left over; 0.
        leaked: What they are, one line each.
        mismatches: Requests whose tokens differ or that failed, one line each.
        seconds: The whole run, from the command's start to the last process's end.
        generate_seconds: Of it, from the first request to the last token.
        dtype: What both tiers and the single process computed in.
        model_kind: What the layers of the demo model keep, or the architecture of a model that was given.
        groups: What each group of layers took, of the requests that ended well; not with `offload`, where not all of it travels.
        offload: What became of KV outside of the device; None without such tiers.
        environment: Versions and machine, for the record.
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
    transfer_seconds: Percentiles
    exposed_seconds: Percentiles
    ttft_seconds: Percentiles
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
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_success(self) -> bool:
        return self.tokens_match and not self.failed and not self.leaks

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {name: _plain(getattr(self, name)) for name in (one.name for one in dataclasses.fields(self))}


def _plain(value: Any) -> Any:
    if isinstance(value, Percentiles):
        return {"p50": value.p50, "p99": value.p99}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, GroupReport | OffloadReport):
        return dataclasses.asdict(value)
    return dict(value) if isinstance(value, Mapping) else value


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed (nearest rank); 0 without values.

    Raises:
        ConfigError: `share` is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ConfigError(f"share is {share}; it must be above 0 and at most 1")
    if not values:
        return 0.0
    return sorted(values)[math.ceil(share * len(values)) - 1]


def percentiles(values: Sequence[float]) -> Percentiles:
    return Percentiles(p50=percentile(values, 0.5), p99=percentile(values, 0.99))


def make_report(
    outcomes: Sequence[RequestOutcome],
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
) -> DemoReport:
    """Add up a run.

    Args:
        outcomes: Of each request.
        reference: What a single process made of the same prompts, in the same order; None where it was not waited for.
        decode: The decode node's status after the last request.
        leaked: What is left over.
        dtype: What both tiers and the single process computed in.
        model_kind: What the layers of the demo model keep, or the architecture of a model that was given.
        prefill: The prefill node's status; None leaves out what each group of layers took.
        offload: What became of KV outside of the device.

    Raises:
        ConfigError: The two sequences are not equally long.
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
        link_bandwidth_bytes_per_s=percentile([link.bandwidth_bytes_per_s for link in decode.links], 0.5),
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
        groups=() if prefill is None else group_reports(prefill, decode, [_lengths(one) for one in outcomes if one.done]),
        offload=offload,
        environment=dict(environment),
    )


def _lengths(outcome: RequestOutcome) -> RequestLengths:
    return RequestLengths(prompt_tokens=outcome.prompt_tokens, generated_tokens=len(outcome.token_ids))


def _errors(outcomes: Sequence[RequestOutcome], *, after_acceptance: bool) -> tuple[str, ...]:
    return tuple(
        f"request {number}: {outcome.error}"
        for number, outcome in enumerate(outcomes, start=1)
        if outcome.error and (outcome.prompt_tokens > 0) is after_acceptance
    )


def find_mismatches(outcomes: Sequence[RequestOutcome], reference: Sequence[ReferenceResult | None]) -> list[str]:
    """One line for each request that failed or is not exactly what the reference made, in order.

    Raises:
        ConfigError: The two sequences are not equally long.
    """
    if len(outcomes) != len(reference):
        raise ConfigError(f"there are {len(outcomes)} outcomes and {len(reference)} reference results; both must be equally many")
    lines = []
    for number, (outcome, wanted) in enumerate(zip(outcomes, reference, strict=True), start=1):
        difference = _difference(outcome, wanted)
        if difference:
            lines.append(f"request {number}: {difference}")
    return lines


def _difference(outcome: RequestOutcome, wanted: ReferenceResult | None) -> str:
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


def find_leaks(status: pb.NodeStatus) -> list[str]:
    """What a node that has nothing to do still holds, one line each; empty when it holds nothing."""
    lines = [
        f"{status.role} node: {name} is {getattr(status, name)}"
        for name in ("queued_requests", "running_requests")
        if getattr(status, name)
    ]
    held = (
        "pool_pages_reserved", "pool_pages_bound", "ring_live_bytes", "ring_live_grants", "ring_quarantined_bytes",
        "pending_transfers", "ending_sessions",
        "staging_slots_used", "requests",
    )  # fmt: skip
    for rank in status.ranks:
        lines += [f"{status.role} rank {rank.rank}: {name} is {getattr(rank, name)}" for name in held if getattr(rank, name)]
    return lines
