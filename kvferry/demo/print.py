"""The demo's report for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from kvferry.demo.dtype import EXACT_DTYPE
from kvferry.demo.groups import GroupReport
from kvferry.demo.offload import OffloadReport
from kvferry.demo.report import DemoReport, Percentiles
from kvferry.demo.view import in_bytes

_MAX_LINES = 10

LEGEND = (
    "transfer: from a prompt's first gather, while later chunks are still being computed, to its last release; "
    "exposed: what of it comes after the last computed chunk; overlap: the rest."
)
GROUP_LEGEND = (
    "used: pages that all requests took, one after the other; more than there are were used again. Tokens behind a window, and "
    "those that a state has taken in, need not travel."
)
OFFLOAD_LEGEND = (
    "hit tokens: of prompts, found in that tier and not sent by prefill. What of a long prompt arrives in host memory is not "
    "copied there. Run the command again with the same directory: what this run has stored is found then."
)
TIES = (
    "Computed in the model's own dtype ({dtype}): where logits tie under rounding, two correct runs may choose different tokens. "
    "Without --dtype model, all compute in float32."
)


def print_report(console: Console, report: DemoReport) -> None:
    """Print the table, what went wrong, and what it would have cost without staging."""
    table = Table(title="what moved", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _rows(report):
        table.add_row(name, value)
    console.print(table)
    if has_kinds(report):
        console.print(_group_table(report))
        console.print(GROUP_LEGEND, markup=False, highlight=False, soft_wrap=True)
    if report.offload is not None:
        console.print(_offload_table(report.offload))
        console.print(OFFLOAD_LEGEND, markup=False, highlight=False, soft_wrap=True)
    if report.writes:
        console.print(LEGEND, markup=False, highlight=False, soft_wrap=True)
    for title, lines in _complaints(report):
        for line in lines[:_MAX_LINES]:
            console.print(f"{title}: {line}", style="red", markup=False, highlight=False, soft_wrap=True)
        if len(lines) > _MAX_LINES:
            console.print(f"{title}: and {len(lines) - _MAX_LINES} more", style="red", markup=False)
    if report.dtype != EXACT_DTYPE:
        console.print(TIES.format(dtype=report.dtype), markup=False, highlight=False, soft_wrap=True)
    console.print(cost_line(report), markup=False, highlight=False, soft_wrap=True)
    if report.is_success:
        text = f"All {report.generated_tokens:,} tokens of {report.requests} requests are those that a single process made."
        console.print(text, style="green", markup=False, soft_wrap=True)
    else:
        console.print(verdict(report), style="bold red", markup=False, soft_wrap=True)


def _complaints(report: DemoReport) -> list[tuple[str, Sequence[str]]]:
    """What went wrong, by kind; a request that failed has made too few tokens, and no wrong ones."""
    differing = [line for line in report.mismatches if line not in (*report.refusals, *report.failures)]
    return [
        ("refused", report.refusals),
        ("failed", report.failures),
        ("tokens differ", differing),
        ("left over", report.leaked),
    ]


def has_kinds(report: DemoReport) -> bool:
    """Whether the model's layers keep anything but K and V of every token."""
    return [group.keeps for group in report.groups] not in ([], ["K or V"]) or any(one.tokens_left_out for one in report.groups)


def _group_table(report: DemoReport) -> Table:
    table = Table(title=f"what each group of layers took ({report.model_kind})", title_justify="left")
    table.add_column("group of layers")
    for group in report.groups:
        table.add_column(group.name, justify="right")
    rows: dict[str, Callable[[GroupReport], str]] = {
        "layers": lambda group: f"{group.layers}, {group.keeps}",
        "pages of a prefill rank": lambda group: f"{group.prefill_pages:,}; {group.prefill_pages_used:,} used",
        "pages of a decode rank": lambda group: f"{group.decode_pages:,}; {group.decode_pages_used:,} used",
        "sent": lambda group: f"{group.tokens_sent:,} {'states' if group.keeps == 'state' else 'tokens'}",
        "tokens that need not travel": lambda group: f"{group.tokens_left_out:,}",
        "bytes moved": lambda group: in_bytes(group.bytes_sent),
    }
    for name, shown in rows.items():
        table.add_row(name, *map(shown, report.groups))
    return table


def _offload_table(offload: OffloadReport) -> Table:
    table = Table(title="where the KV of the decode tier lay", title_justify="left")
    for name in ("", "device", "host memory", "store"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("room of a rank", f"{offload.device_tokens:,} tokens", f"{offload.host_tokens:,} tokens", "the directory's")
    table.add_row("copied in", "", in_bytes(offload.saved_bytes), in_bytes(offload.stored_bytes))
    table.add_row("copied out", "", in_bytes(offload.loaded_bytes), in_bytes(offload.fetched_bytes))
    hits = (offload.hit_tokens_device, offload.hit_tokens_host, offload.hit_tokens_storage)
    table.add_row("hit tokens", *(f"{tokens:,}" for tokens in hits))
    table.add_row("left early", f"{offload.released_pages:,} of its pages", "", "")
    table.add_row("brought back", f"{offload.restored_pages:,} of its pages", "", "")
    table.add_row("longest request", f"{offload.longest_request_tokens:,} tokens", "", "")
    table.add_row("not computed by prefill", "", "", f"{offload.skipped_tokens:,} tokens")
    if offload.unstored_pages:
        table.add_row("could not be stored", "", "", f"{offload.unstored_pages:,} pages")
    return table


def cost_line(report: DemoReport) -> str:
    """What the same transfer would have cost if every token x layer x K/V slice of a route were a write."""
    if not report.writes:
        return "Nothing was moved."
    factor = report.writes_without_staging / report.writes
    kept = list(dict.fromkeys(group.keeps for group in report.groups if group.keeps != "state")) or ["K or V"]
    states = ", and one for each layer's state" if any(group.keeps == "state" for group in report.groups) else ""
    size = f"{report.bytes_moved / max(report.writes_without_staging, 1):,.0f} bytes"
    average = " on average" if len(report.groups) > 1 else ""
    return (
        f"Without staging, each route takes one write for each token, layer and {' or '.join(kept)}{states}: "
        f"{report.writes_without_staging:,} writes of {size}{average}. "
        f"Here: {report.writes:,} writes of {in_bytes(report.bytes_moved / report.writes)}, {factor:,.0f} times fewer."
    )


def verdict(report: DemoReport) -> str:
    """One line on what is wrong with a run that did not succeed."""
    parts = []
    if report.refusals:
        parts.append(f"{len(report.refusals)} of {report.requests} requests were refused")
    if report.failures:
        parts.append(f"{len(report.failures)} of {report.requests} requests failed")
    differing = len(report.mismatches) - report.failed
    if differing > 0:
        parts.append(f"{differing} of {report.requests} requests have other tokens than a single process")
    if report.leaks:
        parts.append(f"{report.leaks} things are left over")
    return "Failed: " + ", ".join(parts) + "."


def _rows(report: DemoReport) -> list[tuple[str, str]]:
    bandwidth = report.link_bandwidth_bytes_per_s / 1e9
    return [
        ("requests", f"{report.requests:,}"),
        ("tokens match a single process", _tokens_match(report)),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("generated tokens", f"{report.generated_tokens:,}"),
        ("bytes moved", in_bytes(report.bytes_moved)),
        ("writes", f"{report.writes:,}"),
        ("writes without staging", f"{report.writes_without_staging:,}"),
        ("chunks sent again", f"{report.resends:,}"),
        ("transport", f"{report.transport}, {report.links} links, median {bandwidth:.1f} GB/s"),
        ("transfer p50 / p99", _seconds(report.transfer_seconds)),
        ("exposed p50 / p99", _seconds(report.exposed_seconds)),
        ("time to first token p50 / p99", _seconds(report.ttft_seconds)),
        ("overlap with compute", f"{report.overlap_ratio:.0%}"),
        ("ring peak", in_bytes(report.ring_peak_bytes)),
        ("watermark acks", f"{report.watermark_acks:,}"),
        ("leaks", f"{report.leaks}"),
        ("prompts to last token", f"{report.generate_seconds:.1f} s"),
        ("whole run", f"{report.seconds:.1f} s"),
    ]


def _tokens_match(report: DemoReport) -> str:
    if report.tokens_match:
        return "yes"
    if len(report.mismatches) > report.failed:
        return "NO"
    return f"{report.compared} compared, none differs" if report.compared else "not compared"


def _seconds(values: Percentiles) -> str:
    return f"{values.p50 * 1e3:,.1f} / {values.p99 * 1e3:,.1f} ms"
