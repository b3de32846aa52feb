"""Bars made of characters, and what others wrote, for tables on a terminal."""

from __future__ import annotations

from typing import Final

from rich.text import Text

FULL: Final = "█"
EMPTY: Final = "░"
MARK: Final = "┃"


def printable(text: str, style: str = "") -> Text:
    """What somebody else wrote, without what a terminal would take for orders."""
    return Text("".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text), style=style)


def bar(part: float, whole: float, *, width: int, style: str = "blue") -> Text:
    """A bar that is filled from the left; of what is above 0 one cell at least.

    Args:
        part, whole: In the same unit; a whole of 0 is an empty bar.
        width: Cells.
    """
    share = min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
    cells = round(share * width)
    if part > 0 and whole > 0:
        cells = max(1, cells)
    return Text.assemble((FULL * cells, style), (EMPTY * (width - cells), "dim"))


def ring_bar(*, live: int, capacity: int, watermark: int, width: int, style: str = "blue") -> Text:
    """A ring laid flat: live bytes from the watermark on, around the ring's end where need be, and a mark where the watermark is.

    Args:
        live: Bytes of unreleased grants; above the capacity the whole ring is.
        capacity: Size of the ring, above 0.
        watermark: Byte position below which everything is released.
        width: Cells.
    """
    mark = watermark % capacity * width // capacity
    share = min(1.0, live / capacity)
    cells = max(1, round(share * width)) if live else 0
    text = Text()
    for cell in range(width):
        is_live = (cell - mark) % width < cells
        if cell == mark:
            text.append(MARK, f"bold {style}" if is_live else "bold")
        else:
            text.append(FULL if is_live else EMPTY, style if is_live else "dim")
    return text
