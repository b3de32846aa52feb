"""Show the demo: a live table on a terminal or plain lines elsewhere while it runs, and the report at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvferry.cli.text_bars import text_table
from kvferry.demo.offload import OffloadReport, PrefillOffloadReport
from kvferry.demo.reference import EXACT_DTYPE
from kvferry.demo.report import DemoReport, DemoRequest, GroupReport
from node_runtime.view_cells import in_bytes, ring_table
from transfer.pb import kvferry_pb2 as pb

_REFRESH_HZ: Final = 8
_ROWS_BESIDE_REQUESTS: Final = 10  # phase, headings, ring bars
_MAX_LINES: Final = 10

LEGEND: Final = (
    "transfer: from a prompt's first gather, while later chunks are computed, to its last release; "
    "exposed: the part after the last computed chunk; overlap: the rest."
)
GROUP_LEGEND: Final = (
    "used: pages of all requests, one after the other; pages are used again. Tokens behind a window, and tokens in a state, "
    "are not transferred."
)
OFFLOAD_LEGEND: Final = (
    "hit tokens: prompt tokens found in that tier, not sent by prefill. KV of a long prompt that arrives in host memory is not "
    "counted as copied. Run the command again with the same directory to find the stored KV."
)
TIES: Final = (
    "Computed in the model's own dtype ({dtype}): if rounded logits tie, two correct runs can choose different tokens. "
    "Without --dtype model, all sides compute in float32."
)


class DemoView:
    """Show a run; use it as a context manager. On a terminal, `requests` and `status` are drawn as they change.

    Args:
        console: Where the output goes.
    """

    def __init__(self, console: Console) -> None:
        self.requests: Sequence[DemoRequest] = ()
        self.status: pb.NodeStatus | None = None
        self._console = console
        self._begun_s = time.monotonic()
        self._phase = ""
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, get_renderable=self.render, refresh_per_second=_REFRESH_HZ, transient=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Show the phase that begins now."""
        self._phase = text
        self._print(text)

    def finished(self, request: DemoRequest) -> None:
        """Show a request that succeeded or failed."""
        what = request.error or f"{request.prompt_tokens} -> {len(request.token_ids)} tokens:{_one_line(request.text)}"
        self._print(f"request {request.number} {request.state}: {what}")

    def _print(self, text: str) -> None:
        if self._live is None:
            line = f"[{time.monotonic() - self._begun_s:5.1f} s] {text}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def render(self) -> RenderableType:
        """Return the current view: the requests with their streamed text, and the rings of the decode ranks."""
        parts: list[RenderableType] = [Text(f"{self._phase}  {time.monotonic() - self._begun_s:.0f} s", style="bold")]
        if self.requests:
            parts.append(self._request_table())
        if self.status is not None and self.status.ranks:
            parts.append(text_table(ring_table((f"rank {rank.rank}", rank) for rank in self.status.ranks if rank.ring_capacity)))
        return Group(*parts)

    def _request_table(self) -> Table:
        table = Table(box=None, padding=(0, 1), expand=True)
        for heading in ("#", "prompt", "tokens"):
            table.add_column(heading, justify="right")
        table.add_column("", width=12)
        table.add_column("text", ratio=1, no_wrap=True, overflow="crop")
        room = max(4, self._console.height - _ROWS_BESIDE_REQUESTS)
        width = max(20, self._console.width - 45)
        # Requests that have ended make room for those that run.
        shown = sorted(self.requests, key=lambda request: (request.state in ("done", "failed"), request.number))[:room]
        for request in sorted(shown, key=lambda request: request.number):
            text = request.error or _one_line(request.text)
            table.add_row(
                str(request.number),
                str(request.prompt_tokens or ""),
                str(len(request.token_ids) or ""),
                ProgressBar(total=request.max_new_tokens, completed=len(request.token_ids), width=12),
                Text(text[-width:], style="red" if request.error else ""),
            )
        hidden = len(self.requests) - len(shown)
        if hidden:
            done = sum(request.state == "done" for request in self.requests)
            table.add_row("", "", "", "", Text(f"and {hidden} more; {done} of {len(self.requests)} are done", style="dim"))
        return table


def _one_line(text: str) -> str:
    return " " + " ".join(text.split()) if text.strip() else ""


def print_report(console: Console, report: DemoReport) -> None:
    """Print the tables, the problems, and the cost without staging."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    table = Table(title="transfer summary", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _rows(report):
        table.add_row(name, value)
    console.print(table)
    if has_kinds(report):
        console.print(_group_table(report))
        say(GROUP_LEGEND)
    if report.offload is not None:
        console.print(_offload_table(report.offload))
        say(OFFLOAD_LEGEND)
    if report.prefill_offload is not None:
        console.print(_prefill_offload_table(report.prefill_offload))
    if report.sparse is not None:
        say(
            f"Block-sparse prefill attended to {report.sparse.density:.0%} of the blocks. With threshold "
            f"{report.sparse.threshold:g}, {report.sparse.same_tokens} of {report.requests} requests have exactly the tokens of "
            f"full attention; on average {report.sparse.similarity:.0%} of a request's tokens come before the first that differs."
        )
    if report.writes:
        say(LEGEND)
    for title, lines in _complaints(report):
        for line in lines[:_MAX_LINES]:
            say(f"{title}: {line}", "red")
        if len(lines) > _MAX_LINES:
            say(f"{title}: and {len(lines) - _MAX_LINES} more", "red")
    if report.dtype != EXACT_DTYPE:
        say(TIES.format(dtype=report.dtype))
    say(cost_line(report))
    if report.is_success and not report.tokens_match:
        say(f"PASS: all {report.requests} requests are complete, and no resource is left over.", "green")
    elif report.is_success:
        say(
            f"PASS: all {report.generated_tokens:,} tokens of {report.requests} requests match the single-process reference.",
            "green",
        )
    else:
        say(verdict(report), "bold red")


def _complaints(report: DemoReport) -> list[tuple[str, Sequence[str]]]:
    """Return the problems by kind. A request that failed has too few tokens, but no wrong ones."""
    differing = [line for line in report.mismatches if line not in (*report.refusals, *report.failures)]
    return [
        ("refused", report.refusals),
        ("failed", report.failures),
        ("tokens differ", () if report.is_success else differing),
        ("left over", report.leaked),
    ]


def has_kinds(report: DemoReport) -> bool:
    """Return True if a layer of the model keeps anything else than K and V of every token."""
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


def _prefill_offload_table(offload: PrefillOffloadReport) -> Table:
    table = Table(title="where the KV of the prefill tier lay", title_justify="left")
    for name in ("", "device", "host memory"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("room of a rank", f"{offload.device_tokens:,} tokens", f"{offload.host_tokens:,} tokens")
    table.add_row("longest prompt", "", f"{offload.longest_prompt_tokens:,} tokens")
    table.add_row("written by steps", "", in_bytes(offload.saved_bytes))
    table.add_row("read by steps", "", in_bytes(offload.loaded_bytes))
    return table


def cost_line(report: DemoReport) -> str:
    """Return the cost of the same transfer with a write for each token, layer and K/V slice of a route."""
    if not report.writes:
        return "Nothing was transferred."
    factor = report.writes_without_staging / report.writes
    kept = list(dict.fromkeys(group.keeps for group in report.groups if group.keeps != "state")) or ["K or V"]
    states = ", and one for each layer's state" if any(group.keeps == "state" for group in report.groups) else ""
    size = f"{report.bytes_moved / max(report.writes_without_staging, 1):,.0f} bytes"
    average = " on average" if len(report.groups) > 1 else ""
    return (
        f"Without staging, each route needs one write for each token, layer and {' or '.join(kept)}{states}: "
        f"{report.writes_without_staging:,} writes of {size}{average}. "
        f"Here: {report.writes:,} writes of {in_bytes(report.bytes_moved / report.writes)}, {factor:,.0f} times fewer."
    )


def verdict(report: DemoReport) -> str:
    """Return one line with the problems of a run that did not succeed."""
    parts = []
    if report.refusals:
        parts.append(f"{len(report.refusals)} of {report.requests} requests were refused")
    if report.failures:
        parts.append(f"{len(report.failures)} of {report.requests} requests failed")
    differing = len(report.mismatches) - report.failed
    if differing > 0:
        parts.append(f"{differing} of {report.requests} requests have other tokens than a single process")
    if report.leaks:
        parts.append(f"{report.leaks} resources are left over")
    return "Failed: " + ", ".join(parts) + "."


def _rows(report: DemoReport) -> list[tuple[str, str]]:
    bandwidth = report.link_bandwidth_bytes_per_s / 1e9
    drafts = [("draft tokens accepted", f"{report.accepted_tokens:,} of {report.draft_tokens:,}")] if report.draft_tokens else []
    return [
        ("requests", f"{report.requests:,}"),
        ("tokens match a single process", _tokens_match(report)),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("generated tokens", f"{report.generated_tokens:,}"),
        *drafts,
        ("bytes moved", in_bytes(report.bytes_moved)),
        ("writes", f"{report.writes:,}"),
        ("writes without staging", f"{report.writes_without_staging:,}"),
        ("resent chunks", f"{report.resends:,}"),
        ("transport", f"{report.transport}, {report.links} links, median {bandwidth:.1f} GB/s"),
        ("transfer p50 / p99", _milliseconds(report.transfer_seconds)),
        ("exposed p50 / p99", _milliseconds(report.exposed_seconds)),
        ("time to first token p50 / p99", _milliseconds(report.ttft_seconds)),
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


def _milliseconds(seconds: Mapping[str, float]) -> str:
    return f"{seconds['p50'] * 1e3:,.1f} / {seconds['p99'] * 1e3:,.1f} ms"
