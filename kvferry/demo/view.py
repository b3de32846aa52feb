"""What the demo shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from transfer.pb import kvferry_pb2 as pb

_REFRESH_HZ = 8
_BAR_COLUMNS = 24
_ROWS_BESIDE_REQUESTS = 10  # phase, headings, ring bars


@dataclass(slots=True, kw_only=True, eq=False)
class RequestProgress:
    """One request as the view shows it; the demo changes it as events come."""

    number: int
    max_new_tokens: int
    prompt_tokens: int = 0
    token_ids: list[int]
    text: str = ""
    state: str = "queued"  # "queued", "accepted", "generating", "done", "failed"
    error: str = ""
    ttft_s: float = 0.0


class DemoView(Protocol):
    """Shows a run; used as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None: ...

    def phase(self, text: str) -> None:
        """Say what begins now."""
        ...

    def watch(self, requests: Sequence[RequestProgress]) -> None:
        """The requests to show from now on."""
        ...

    def finished(self, request: RequestProgress) -> None:
        """A request has ended, well or not."""
        ...

    def status(self, status: pb.NodeStatus) -> None:
        """The decode node's newest status."""
        ...


def make_view(console: Console) -> DemoView:
    """The view that fits where the output goes."""
    return LiveView(console) if console.is_terminal else PlainView(console)


class PlainView:
    """One line for each phase and each request that ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return

    def phase(self, text: str) -> None:
        self._print(text)

    def watch(self, requests: Sequence[RequestProgress]) -> None:
        return

    def finished(self, request: RequestProgress) -> None:
        what = request.error or f"{request.prompt_tokens} -> {len(request.token_ids)} tokens:{_one_line(request.text)}"
        self._print(f"request {request.number} {request.state}: {what}")

    def status(self, status: pb.NodeStatus) -> None:
        return

    def _print(self, text: str) -> None:
        line = f"[{time.monotonic() - self._begun_s:5.1f} s] {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A table of requests with their text as it streams, and the rings of the decode ranks."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun_s = time.monotonic()
        self._phase = ""
        self._requests: Sequence[RequestProgress] = ()
        self._status: pb.NodeStatus | None = None
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=_REFRESH_HZ, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def phase(self, text: str) -> None:
        self._phase = text

    def watch(self, requests: Sequence[RequestProgress]) -> None:
        self._requests = requests

    def finished(self, request: RequestProgress) -> None:
        return

    def status(self, status: pb.NodeStatus) -> None:
        self._status = status

    def render(self) -> RenderableType:
        """The picture of this moment."""
        parts: list[RenderableType] = [Text(f"{self._phase}  {time.monotonic() - self._begun_s:.0f} s", style="bold")]
        if self._requests:
            parts.append(self._request_table())
        if self._status is not None and self._status.ranks:
            parts.append(ring_table(self._status))
        return Group(*parts)

    def _request_table(self) -> Table:
        table = Table(box=None, padding=(0, 1), expand=True)
        table.add_column("#", justify="right")
        table.add_column("prompt", justify="right")
        table.add_column("tokens", justify="right")
        table.add_column("", width=12)
        table.add_column("text", ratio=1, no_wrap=True, overflow="crop")
        room = max(4, self._console.height - _ROWS_BESIDE_REQUESTS)
        width = max(20, self._console.width - 45)
        # Those that move are what one looks at; those that have ended make room for them.
        shown = sorted(self._requests, key=lambda request: (request.state in ("done", "failed"), request.number))[:room]
        for request in sorted(shown, key=lambda request: request.number):
            text = request.error or _one_line(request.text)
            table.add_row(
                str(request.number),
                str(request.prompt_tokens or ""),
                str(len(request.token_ids) or ""),
                ProgressBar(total=request.max_new_tokens, completed=len(request.token_ids), width=12),
                Text(text[-width:], style="red" if request.error else ""),
            )
        hidden = len(self._requests) - len(shown)
        if hidden:
            done = sum(request.state == "done" for request in self._requests)
            table.add_row("", "", "", "", Text(f"and {hidden} more; {done} of {len(self._requests)} are done", style="dim"))
        return table


def ring_table(status: pb.NodeStatus) -> Table:
    """The rings of a decode node's ranks, with a bar for what is live."""
    table = Table(box=None, padding=(0, 1))
    for heading in ("ring", "live", "", "peak", "of", "watermark"):
        if heading:
            table.add_column(heading, justify="left" if heading == "ring" else "right", no_wrap=True)
        else:
            table.add_column(max_width=_BAR_COLUMNS)  # on a narrow terminal the bar gives way, and no number is cut
    for rank in status.ranks:
        table.add_row(
            f"rank {rank.rank}",
            in_bytes(rank.ring_live_bytes),
            ProgressBar(total=max(rank.ring_capacity, 1), completed=rank.ring_live_bytes),
            in_bytes(rank.ring_peak_bytes),
            in_bytes(rank.ring_capacity),
            f"{rank.watermark_position:,}",
        )
    return table


def in_bytes(num_bytes: float) -> str:
    """A number of bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("the last unit takes every number")


def _one_line(text: str) -> str:
    return " " + " ".join(text.split()) if text.strip() else ""
