"""Tables, bars and reported text on a terminal."""

from __future__ import annotations

from typing import Final

from rich.table import Table
from rich.text import Text

from node_runtime.view_cells import Badge, Cell, CellTable, Column, Meter, Tone

FULL: Final = "█"
EMPTY: Final = "░"
MARK: Final = "┃"
_STYLES: Final = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.WARN: "yellow", Tone.BAD: "red", Tone.DIM: "dim"}
_BAR_COLUMNS: Final = 10
_RING_COLUMNS: Final = 24


def printable(text: str, style: str = "") -> Text:
    """Return reported text without the characters that a terminal interprets as control sequences."""
    return Text("".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text), style=style)


def bar(meter: Meter, width: int) -> Text:
    """Draw a bar; a value above 0 fills at least one cell.

    Args:
        width: Cells.
    """
    style = _STYLES[meter.tone] or "blue"
    share = min(1.0, max(0.0, meter.value / meter.whole)) if meter.whole > 0 else 0.0
    cells = max(round(share * width), 1 if share else 0)
    mark = None if meter.begin is None else int(meter.begin * width // meter.whole)
    text = Text(no_wrap=True, overflow="crop")  # on a narrow terminal the bar is cut, but no number
    for cell in range(width):
        is_full = (cell - (mark or 0)) % width < cells
        if cell == mark:
            text.append(MARK, f"bold {style}" if is_full else "bold")
        else:
            text.append(FULL if is_full else EMPTY, style if is_full else "dim")
    return text


def cell_text(cell: Cell) -> Text:
    """Draw a cell of a table."""
    match cell:
        case Meter():
            return bar(cell, _BAR_COLUMNS if cell.begin is None else _RING_COLUMNS)
        case Badge():
            return printable(cell.text, _STYLES[cell.tone])
    return printable(cell)


def heading(column: Column) -> Text:
    return Text(column.title, justify="right" if column.is_right else "left")


def text_table(table: CellTable) -> Table:
    """Draw a table; no text of it is cut off."""
    title = Text(table.title, style="table.title") if table.title else None
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in table.columns:
        drawn.add_column(
            heading(column), justify="right" if column.is_right else "left", overflow="fold", no_wrap=column.is_right
        )
    for row in table.rows:
        drawn.add_row(*map(cell_text, row.cells))
    return drawn
