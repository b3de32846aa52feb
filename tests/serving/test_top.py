"""`kvferry top` shows the running cluster under load, with `--once` and live."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from click.testing import Result
from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog, Static
from typer.testing import CliRunner

from kvferry.__main__ import app as commands
from kvferry.top.app import Confirm, TopApp
from kvferry.top.cluster_watch import ClusterWatch
from node_runtime import exit_codes
from tests.serving.conftest import Serving
from transfer.registry.security import Security

ATTEMPTS = 5


def run_top(serving: Serving, *arguments: str) -> Result:
    return CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(commands, ["top", *arguments, *serving.tls_options()])


def test_top_once_shows_the_whole_cluster_from_a_prefill_node(serving: Serving) -> None:
    bar, decode = "[█░]{10}", serving.cluster.decode.address
    with serving.load():
        for _ in range(ATTEMPTS):  # a caller can be between two of its long requests
            found = run_top(serving, "--once", serving.cluster.prefill.address)
            assert found.exit_code == 0, found.stderr
            lines = [" ".join(line.split()) for line in found.stdout.splitlines()]
            generating = [line for line in lines if line.startswith("customer-") and " generating " in line]
            if generating:
                break
    assert re.fullmatch(r"kvferry: 1 prefill, 1 decode; 2 links; \d+ requests in flight", lines[0])
    for heading in (
        "nodes",
        "tier node state queued running pool staging up version reason",
        "rings",
        "ring from the watermark on live peak of watermark quarantine",
        "links",
        "from prefill rank to decode rank lane latency probe now of probe not faster because",
        "requests",
        "request stage computed moved generated age prefill decode retries",
    ):
        assert heading in lines, found.stdout
    for node in serving.cluster.prefill_nodes:
        row = rf"prefill {node.address} ready \d+ \d+ {bar} [\d,]+ of 1,024 {bar} \d+ of \d+ \S+ (s|min) \S+"
        assert [line for line in lines if re.fullmatch(row, line)], found.stdout
        link = rf"{node.address} #[01] {decode} #0 (?:shm|ucx/\S+) [\d,]+ us [\d.]+ GB/s ({bar} [\d.]+ GB/s [\d.]+|idle)"
        assert [line for line in lines if re.fullmatch(link, line)], found.stdout
    ring = rf"{decode} #0 [█░┃]{{24}} \S+ (B|KiB|MiB) \S+ (B|KiB|MiB) \S+ MiB [\d,]+"
    assert [line for line in lines if re.fullmatch(ring, line)], found.stdout
    progress = rf" generating {bar} 40/40 {bar} 1/1 {bar} \d+/400 "
    assert generating and all(re.search(progress, line) for line in generating), found.stdout


def test_top_reports_unreachable_nodes_and_rejects_invalid_addresses(serving: Serving) -> None:
    found = run_top(serving, "--json", serving.cluster.decode.address, "127.0.0.1:1")
    assert found.exit_code == 0, found.stderr
    nodes = {node["address"]: node for node in json.loads(found.stdout)["nodes"]}
    assert set(nodes) == {node.address for node in serving.cluster.nodes} | {"127.0.0.1:1"}
    assert nodes["127.0.0.1:1"]["status"] is None and nodes["127.0.0.1:1"]["error"]
    alone = run_top(serving, "--once", "127.0.0.1:1")
    assert alone.exit_code == exit_codes.UNAVAILABLE and "127.0.0.1:1 unreachable" in " ".join(alone.stdout.split())
    invalid = run_top(serving, "--once", "nonsense")
    assert invalid.exit_code == exit_codes.BAD_INPUT and invalid.stderr.startswith("kvferry top: ")


def rows_of(app: TopApp, name: str) -> dict[str, list[str]]:
    """Return the displayed cells of a table, by key of the row."""
    table = app.query_one(f"#{name}", DataTable)
    return {str(row.key.value): [cell.plain for cell in table.get_row(row.key)] for row in table.ordered_rows}


def log_of(app: TopApp) -> str:
    return "\n".join(line.text for line in app.query_one("#log", RichLog).lines)


@asynccontextmanager
async def open_top(address: str, security: Security | None = None) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    async with ClusterWatch([address], security=security) as watch:
        app = TopApp(watch, every_s=0.1)
        async with app.run_test(size=(200, 50)) as pilot:
            yield app, pilot


async def shows(pilot: Pilot[None], is_true: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}\n{log_of(pilot.app)}"  # type: ignore[arg-type]
        await pilot.pause(0.05)


async def test_top_live_shows_both_tiers_and_its_keys_pause_sort_and_abort(serving: Serving) -> None:
    decode, prefill = serving.cluster.decode.address, serving.cluster.prefill.address
    with serving.load():
        async with open_top(prefill, serving.security()) as (app, pilot):
            roles = ["prefill", "decode"]  # the role of a node is empty until it has answered
            await shows(pilot, lambda: [row[0] for row in rows_of(app, "nodes").values()] == roles, "all nodes, found from one")
            assert len(rows_of(app, "rings")) == 1 and len(rows_of(app, "links")) == 2
            await shows(pilot, lambda: any(cells[7] for cells in rows_of(app, "links").values()), "the rate of a link")
            await shows(pilot, lambda: any("customer-0" in key for key in rows_of(app, "requests")), "a request")

            await pilot.press("p")
            num_polls = app.num_looks
            await pilot.pause(0.5)
            assert app.num_looks == num_polls and "PAUSED" in str(app.query_one("#summary", Static).render())
            await pilot.press("p")
            await shows(pilot, lambda: app.num_looks > num_polls, "polls after the pause")

            titles = []
            for _ in range(4):
                titles.append(app.query_one("#requests", DataTable).border_title)
                await pilot.press("s")
            assert titles == [f"requests in flight, by {name}" for name in ("age", "stage", "prompt", "node")]

            requests = app.query_one("#requests", DataTable)
            requests.focus()
            asked = ""
            for _ in range(ATTEMPTS):  # a request can end while its row is shown
                await shows(pilot, lambda: select(app, "requests", "customer-0"), "a request to abort")
                await pilot.press("a")
                asked = app.screen.question if isinstance(app.screen, Confirm) else ""
                await pilot.press("n")
                if "customer-0" in asked:
                    break
            assert asked == "Abort request customer-0-story?"
            await pilot.pause(0.3)
            assert "customer-0" not in log_of(app)
            answers = f"request customer-0-story at {decode} "
            for _ in range(ATTEMPTS):  # a request can end while its row or the question is shown
                num_before = log_of(app).count(answers)
                await shows(pilot, lambda: select(app, "requests", "customer-0"), "a request of the same client")
                await pilot.press("a")
                is_asked = isinstance(app.screen, Confirm) and "customer-0" in app.screen.question
                await pilot.press("y" if is_asked else "n")
                if is_asked:
                    await shows(pilot, lambda n=num_before: log_of(app).count(answers) > n, "an answer")  # type: ignore[misc]
                if f"{answers}is aborted" in log_of(app):
                    break
            assert f"{answers}is aborted" in log_of(app), log_of(app)


def select(app: TopApp, name: str, part: str) -> bool:
    """Move the cursor of a table to the first row whose key contains `part`; return False if there is none."""
    keys = list(rows_of(app, name))
    found = next((number for number, key in enumerate(keys) if part in key), None)
    if found is None:
        return False
    table = app.query_one(f"#{name}", DataTable)
    table.focus()
    table.move_cursor(row=found, animate=False)
    return True
