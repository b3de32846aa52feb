"""Cells of tables for people: units, tones and bars, the same on a terminal and on the status page.

Pure values. `kvferry/cli/text_bars.py` draws them as characters, and the script of the status page as HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from transfer.host_memory import shown

if TYPE_CHECKING:
    from node_runtime.cluster_view import LinkView
    from transfer.pb import kvferry_pb2 as pb


class Tone(StrEnum):
    """Meaning of a text or a bar."""

    PLAIN = ""
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    DIM = "dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Badge:
    """Text with a tone; `is_state` if it names a state."""

    text: str
    tone: Tone = Tone.PLAIN
    is_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """A bar. All numbers have the unit of `whole`; a whole of 0 is an empty bar.

    Args:
        label: Names it.
        value: Size of the full part.
        held: Size of the part after it that is held for later.
        begin: Start of the full part, which wraps to 0 at the end. None means 0, without a mark.
    """

    label: str
    value: float
    whole: float
    held: float = 0
    begin: int | None = None
    tone: Tone = Tone.PLAIN


Cell = str | Badge | Meter


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table; `is_right` for numbers."""

    title: str
    is_right: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row; `key` identifies it from one look to the next."""

    cells: tuple[Cell, ...]
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTable:
    """A table for people."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


def table_of(title: str, headings: Iterable[str], rows: Iterable[Row]) -> CellTable:
    """Return a table. A heading that begins with ``>`` marks a column of numbers."""
    columns = tuple(Column(title=one.removeprefix(">"), is_right=one.startswith(">")) for one in headings)
    return CellTable(title=title, columns=columns, rows=tuple(rows))


_TONES: Final = {
    **dict.fromkeys(("ready", "joined", "closed"), Tone.GOOD),
    **dict.fromkeys(("failed", "lost", "open", "unreachable"), Tone.BAD),
    **dict.fromkeys(("computing", "sending", "receiving", "generating", "ending", "alias"), Tone.DIM),
}


def state_badge(state: str, text: str = "") -> Badge:
    """Return the badge of a node, a peer, a breaker or a stage. Transient and unknown states are warnings.

    Args:
        text: Text to show instead of the state.
    """
    return Badge(text=text or state, tone=_TONES.get(state, Tone.WARN), is_state=True)


def number(value: float, digits: int = 0) -> str:
    """Return a number with thousands separators. NaN and infinite numbers become 0."""
    return f"{value if math.isfinite(value) else 0:,.{digits}f}"


def in_bytes(num_bytes: float) -> str:
    """Return a number of bytes in binary units."""
    return shown(round(num_bytes))


def duration(seconds: float) -> str:
    """Return a time in the unit that keeps it short."""
    if seconds < 100 or not math.isfinite(seconds):
        return f"{number(seconds, 1)} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def latency(seconds: float) -> str:
    return f"{number(seconds * 1e6)} us"


def bandwidth(bytes_per_s: float) -> str:
    return f"{number(bytes_per_s / 1e9, 2)} GB/s"


def ring_meter(rank: pb.RankStatus) -> Meter:
    """Return the bar of a ring, filled from the watermark on."""
    return Meter(
        label=f"ring of rank {rank.rank}",
        value=rank.ring_live_bytes,
        whole=rank.ring_capacity,
        begin=rank.watermark_position % rank.ring_capacity,
    )


def ring_table(rings: Iterable[tuple[str, pb.RankStatus]]) -> CellTable:
    """Return the table of rings.

    Args:
        rings: Name and status of each rank with a ring.
    """
    headings = ("ring", "from the watermark on", ">live", ">peak", ">of", ">watermark", ">quarantine")
    rows = (
        Row(
            key=name,
            cells=(
                name,
                ring_meter(rank),
                in_bytes(rank.ring_live_bytes),
                in_bytes(rank.ring_peak_bytes),
                in_bytes(rank.ring_capacity),
                number(rank.watermark_position),
                Badge(text=in_bytes(rank.ring_quarantined_bytes), tone=Tone.WARN) if rank.ring_quarantined_bytes else "",
            ),
        )
        for name, rank in rings
    )
    return table_of("rings", headings, rows)


def link_table(
    links: Iterable[LinkView], *, has_use: bool = True, most_bytes_per_s: float = 0.0, has_obstacles: bool | None = None
) -> CellTable:
    """Return the sorted table of links: the probe's measurements, and the speed of each link while it is busy.

    Args:
        has_use: Whether to show the speed of busy links.
        most_bytes_per_s: Draw a bar of each probe's bandwidth relative to this one; 0 draws none.
        has_obstacles: Whether to show why links are not faster; None shows it if a link has such a reason.
    """
    found = sorted(links, key=lambda one: (one.prefill, one.status.prefill_rank, one.decode, one.status.decode_rank))
    if has_obstacles is None:
        has_obstacles = any(link.status.obstacle for link in found)
    headings = ["from prefill rank", "to decode rank", "lane", ">latency", *([""] if most_bytes_per_s else []), ">probe"]
    headings += ["", ">now", ">of probe"] if has_use else []
    headings += ["not faster because"] if has_obstacles else []
    rows = []
    for link in found:
        probe = link.status.bandwidth_bytes_per_s
        cells: list[Cell] = [*link.ends, link.status.lane, latency(link.status.latency_s)]
        if most_bytes_per_s:
            cells.append(Meter(label="link probe", value=probe, whole=most_bytes_per_s))
        obstacle = (link.status.obstacle,) if has_obstacles else ()
        rows.append(Row(key=link.name, cells=(*cells, bandwidth(probe), *(_use_cells(link) if has_use else ()), *obstacle)))
    return table_of("links", headings, rows)


def _use_cells(link: LinkView) -> tuple[Cell, Cell, Cell]:
    if link.now_bytes_per_s is None or link.share is None:
        return "", Badge(text="not known" if link.now_bytes_per_s is None else "idle", tone=Tone.DIM), ""
    tone = Tone.WARN if link.is_slow else Tone.PLAIN
    meter = Meter(label="link now", value=link.share, whole=1, tone=tone)
    return meter, bandwidth(link.now_bytes_per_s), Badge(text=number(link.share, 2), tone=tone)
