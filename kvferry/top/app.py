"""The live `kvferry top`: tables of nodes, rings, links and requests, a log of events, and keys for actions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, RichLog, Static

from kvferry.cli.text_bars import cell_text, heading, printable
from kvferry.top.alerts import Alert, Alerts
from kvferry.top.cluster_watch import ClusterWatch
from kvferry.top.view import summary, tables
from node_runtime.cluster_view import ClusterView, RequestRow, Seen
from node_runtime.view_cells import CellTable
from transfer.errors import TransferError

DRAIN_S: Final = 10.0
"""Longest wait for a drain; the node continues to drain after that."""

_SORTS: Final[dict[str, Callable[[RequestRow], tuple[object, ...]]]] = {
    "age": lambda request: (-request.one.age_s,),
    "stage": lambda request: (request.stage, -request.one.age_s),
    "prompt": lambda request: (-request.one.prompt_tokens,),
    "node": lambda request: (request.decode, request.prefill, -request.one.age_s),
}
_TABLES: Final = tables(ClusterView(nodes=()))
"""Without rows."""


class Confirm(ModalScreen[bool]):
    """Asks before an action that cannot be undone."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question

    def compose(self) -> ComposeResult:
        with Vertical(id="question"):
            yield Static(printable(self.question))
            yield Static(Text("y: yes    n: no", style="bold"))

    def action_answer(self, is_yes: bool) -> None:
        self.dismiss(is_yes)


class TopApp(App[None]):
    """See the module's docstring.

    Args:
        watch: Looks at the cluster.
        every_s: Seconds from one look to the next.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: 1; padding: 0 1; text-style: bold; }
    DataTable { border: round $primary; border-title-color: $text-muted; height: auto; }
    DataTable:focus { border: round $accent; }
    #nodes { max-height: 30%; } #rings { max-height: 20%; } #links { max-height: 25%; } #requests { height: 1fr; min-height: 4; }
    #log { height: 5; border: round $primary; border-title-color: $text-muted; }
    Confirm { align: center middle; }
    #question { width: 80%; height: auto; border: thick $warning; padding: 1 2; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("s", "sort", "Sort requests"),
        Binding("d", "drain", "Drain or undrain node"),
        Binding("a", "abort", "Abort request"),
    ]

    def __init__(self, watch: ClusterWatch, *, every_s: float) -> None:
        super().__init__()
        self._watch = watch
        self._every_s = every_s
        self._alerts = Alerts()
        self._view = ClusterView(nodes=())
        self._sorts = list(_SORTS)
        self._is_paused = False
        self.num_looks = 0

    @property
    def alerts(self) -> list[Alert]:
        """Return the alerts that hold now."""
        return list(self._alerts.now.values())

    def compose(self) -> ComposeResult:
        yield Static(Text("looking ..."), id="summary")
        for name in _TABLES:
            yield DataTable[Text](id=name, cursor_type="row", zebra_stripes=True)
        yield RichLog(id="log", max_lines=500, markup=False, highlight=False, wrap=True)
        yield Footer()

    def on_mount(self) -> None:
        for name, empty in _TABLES.items():
            table = self._table(name)
            table.border_title = name
            for number, column in enumerate(empty.columns):
                table.add_column(heading(column), key=str(number))
        self.query_one("#log", RichLog).border_title = "what has happened"
        self._say_sort()
        self._table("nodes").focus()
        self.run_worker(self._look_on(), name="look", exit_on_error=True)

    async def _look_on(self) -> None:
        while True:
            if not self._is_paused:
                view = await self._watch.look()
                if not self._is_paused and self.is_running:  # an app that ends removes its widgets before its workers
                    self._show(view)
            await asyncio.sleep(self._every_s)

    def _show(self, view: ClusterView) -> None:
        self._view = view
        self.num_looks += 1
        self._say_summary()
        self._show_tables()
        begun, ended = self._alerts.update(view)
        for alert in begun:
            self._say(alert.text, style="red" if alert.is_bad else "yellow")
        for alert in ended:
            self._say(f"over: {alert.text}", style="green")

    def _fill(self, content: CellTable) -> None:
        """Write new cells into existing rows, which keeps cursor and scroll position."""
        table = self._table(content.title)
        found = {row.key: list(map(cell_text, row.cells)) for row in content.rows}  # textual requires unique keys
        for cells in found.values():
            for cell, column in zip(cells, content.columns, strict=True):
                cell.justify = "right" if column.is_right else "left"
        rows, keys = found.items(), list(found)
        shown = [row.key.value for row in table.ordered_rows]
        if shown == keys:
            for key, cells in rows:
                for number, cell in enumerate(cells):
                    if table.get_cell(key, str(number)) != cell:
                        table.update_cell(key, str(number), cell, update_width=True)
            return
        selected = shown[table.cursor_row] if 0 <= table.cursor_row < len(shown) else None
        table.clear()
        for key, cells in rows:
            table.add_row(*cells, key=key)
        if selected in keys:
            table.move_cursor(row=keys.index(selected), animate=False)

    # Keys

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._say_summary()

    def action_sort(self) -> None:
        self._sorts.append(self._sorts.pop(0))
        self._say_sort()
        self._show_tables()

    def action_drain(self) -> None:
        key = self._selected("nodes")
        node = next((one for one in self._view.nodes if one.key == key), None)
        if node is None or node.status is None:
            self._say("no node that answers is selected", style="yellow")
            return
        is_draining = node.status.draining or node.state == "draining"
        what = "take requests again" if is_draining else "drain: take no more requests, and finish those that it has"
        self._ask(f"Shall {node.role} node {node.address} {what}?", lambda: self._drain(node, is_draining))

    def action_abort(self) -> None:
        key = self._selected("requests")
        request = next((one for one in self._view.requests if one.key == key), None)
        if request is None:
            self._say("no request is selected", style="yellow")
            return
        self._ask(f"Abort request {request.one.request_id}?", lambda: self._abort(request))

    def _ask(self, question: str, then: Callable[[], None]) -> None:
        def answered(is_yes: bool | None) -> None:
            if is_yes:
                then()

        self.push_screen(Confirm(question), answered)

    def _drain(self, node: Seen, is_draining: bool) -> None:
        async def call() -> str:
            client = self._watch.client_of(node.address)
            if is_draining:
                was_draining = await client.undrain()
                return f"{node.address} {'takes requests again' if was_draining else 'did not drain'}"
            left = await client.drain(budget_s=DRAIN_S)
            return f"{node.address} drains, {left} requests are left" if left else f"{node.address} has drained"

        self._say(f"{node.address} is asked to {'take requests again' if is_draining else 'drain'}")
        self._call(call)

    def _abort(self, request: RequestRow) -> None:
        address, one = request.decode or request.prefill, request.one

        async def call() -> str:
            found = await self._watch.client_of(address).abort(one.request_id, reason="aborted with kvferry top")
            return f"request {one.request_id} at {address} {'is aborted' if found else 'was over'}"

        self._call(call)

    def _call(self, call: Callable[[], Awaitable[str]]) -> None:
        async def run() -> None:
            try:
                text, style = await call(), ""
            except TransferError as error:
                text, style = str(error), "red"
            if self.is_running:
                self._say(text, style=style)

        self.run_worker(run(), name="call")

    # Showing

    def _show_tables(self) -> None:
        for table in tables(self._view, sorted(self._view.requests, key=_SORTS[self._sorts[0]])).values():
            self._fill(table)

    def _say_summary(self) -> None:
        paused = "  PAUSED" if self._is_paused else ""
        text = Text(f"kvferry: {summary(self._view)}  {time.strftime('%H:%M:%S')}{paused}")
        self.query_one("#summary", Static).update(text)

    def _say_sort(self) -> None:
        self._table("requests").border_title = f"requests in flight, by {self._sorts[0]}"

    def _say(self, text: str, *, style: str = "") -> None:
        self.query_one("#log", RichLog).write(printable(f"{time.strftime('%H:%M:%S')} {text}", style), expand=True)

    def _selected(self, name: str) -> str | None:
        table = self._table(name)
        rows = table.ordered_rows
        return rows[table.cursor_row].key.value if 0 <= table.cursor_row < len(rows) else None

    def _table(self, name: str) -> DataTable[Text]:
        return self.query_one(f"#{name}", DataTable)
