"""Draw docs/images/performance.svg from a record of `bench.gpu_suite`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

ROOT: Final = Path(__file__).resolve().parents[1]
RECORD: Final = ROOT / "bench" / "results" / "2026-11-30-two-h200-gpu-suite.json"
PICTURE: Final = ROOT / "docs" / "images" / "performance.svg"

SIZE: Final = "320 MiB"
_ONE, _SIXTEEN = (f"{SIZE}, {requests} in flight" for requests in (1, 16))

_WIDTH, _LABEL_WIDTH, _VALUE_WIDTH = 860, 330, 70
_ROW_HEIGHT, _BAR_HEIGHT, _TOP, _GROUP_GAP = 24, 16, 48, 30
_OWN, _OTHERS, _CEILING = "#2563eb", "#9ca3af", "#d1d5db"
_STYLE: Final = (
    'text{font-family:system-ui,"DejaVu Sans",sans-serif;font-size:13px;fill:#1f2937}'
    ".h{font-weight:600}.s{font-size:11px;fill:#6b7280}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of the chart.

    Args:
        label: The text left of the bar.
        case: The `case` of the row.
        row: The `what` of the row.
        color: The fill of the bar.
    """

    label: str
    case: str = _ONE
    row: str
    color: str = _OTHERS


_CUDA_IPC, _NIXL, _UCX = (f"kvferry {lane}, pool to pool" for lane in ("cuda_ipc/fused", "nixl", "ucx"))
GROUPS: Final[Sequence[tuple[str, Sequence[Bar]]]] = (
    (
        "One request at a time",
        (
            Bar(label="one copy of the same bytes (ceiling)", row="peer memcpy over CUDA IPC", color=_CEILING),
            Bar(label="NIXL, one contiguous write, no gather", row="NIXL bulk WRITE", color=_CEILING),
            Bar(label="kvferry, cuda_ipc", row=_CUDA_IPC, color=_OWN),
            Bar(label="SGLang: gather, NIXL write, scatter", row="SGLang's gather, NIXL WRITE, SGLang's scatter"),
            Bar(label="kvferry, nixl", row=_NIXL, color=_OWN),
            Bar(label="kvferry, ucx", row=_UCX, color=_OWN),
            Bar(label="NIXL, 40,960 random descriptors (worst case)", row="NIXL, 40,960 descriptors of 8,192 B"),
        ),
    ),
    (
        "16 requests in flight",
        (
            Bar(label="kvferry, cuda_ipc", case=_SIXTEEN, row=_CUDA_IPC, color=_OWN),
            Bar(label="kvferry, nixl", case=_SIXTEEN, row=_NIXL, color=_OWN),
            Bar(label="kvferry, ucx", case=_SIXTEEN, row=_UCX, color=_OWN),
        ),
    ),
)


def performance_svg() -> str:
    """Return the chart as SVG.

    Raises:
        LookupError: The record lacks a row of the chart.
    """
    content = json.loads(RECORD.read_text(encoding="utf-8"))
    speeds = {bar: _speed(content["reports"]["pool to pool"]["rows"], bar) for _, bars in GROUPS for bar in bars}
    scale = (_WIDTH - _LABEL_WIDTH - _VALUE_WIDTH) / max(speeds.values())
    environment = content["environment"]
    parts = [_text(8, 20, "GB/s between two GPUs, requests of 336 MB. kvferry gathers, writes, verifies and scatters", kind="h")]
    y = _TOP
    for title, bars in GROUPS:
        parts.append(_text(8, y + 2, title, kind="h"))
        for bar in bars:
            y += _ROW_HEIGHT
            length = max(1.0, speeds[bar] * scale)
            parts += [
                _text(24, y, bar.label),
                f'<rect x="{_LABEL_WIDTH}" y="{y - 13}" width="{length:.1f}" height="{_BAR_HEIGHT}" fill="{bar.color}"/>',
                _text(_LABEL_WIDTH + length + 6, y, f"{speeds[bar]:.0f}" if speeds[bar] >= 10 else f"{speeds[bar]:.1f}"),
            ]
        y += _GROUP_GAP
    gpus = f"2 x {environment['gpus'][0]}, {environment['nvlink']}"
    what = "Llama-3-70B, 4,096 tokens, TP 4 to TP 2, one rank pair"
    parts.append(_text(8, y, f"{what}. {gpus}. Commit {environment['commit'][:7]}.", kind="s"))
    height = y + 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Transfer speed">'
    background = f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", background, *parts, "</svg>", ""])


def _speed(rows: Sequence[Any], bar: Bar) -> float:
    """Return the bytes of a request over the time of a request, in GB/s."""
    for row in rows:
        if (row["case"], row["what"]) == (bar.case, bar.row):
            return float(row["gb_per_s"])
    raise LookupError(f"{RECORD.name} has no row {bar.row!r} of case {bar.case!r}")


def _text(x: float, y: float, text: str, *, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{attribute}>{escape(text)}</text>'
