"""Real nodes under load: their pages in a real browser, and `kvferry top`, once and live."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog, Static

from kvferry import exit_codes
from kvferry.cluster_watch import ClusterWatch
from kvferry.local_cluster import ClusterNode, LocalCluster
from kvferry.top_app import Confirm, TopApp
from tests.seeing.chromium import Tab
from tests.seeing.conftest import under_load

LOOKS = 5


def url_of(node: ClusterNode) -> str:
    return f"http://{node.http_address}/"


def content_of(node: ClusterNode) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url_of(node)}status.json", timeout=10) as answer:
        return dict(json.load(answer))


def test_a_cluster_under_load_is_seen_from_either_tier(browser: Tab, cluster: LocalCluster) -> None:
    (decode,), prefills = cluster.decode_nodes, cluster.prefill_nodes
    browser.start_anew()
    with under_load(decode.address):
        browser.open(url_of(decode))
        browser.until("document.querySelectorAll('#prefill .card').length === 2")
        browser.until("document.querySelectorAll('#prefill .meters').length === 2")  # both have answered
        browser.until("[...document.querySelectorAll('#links td')].some(cell => cell.innerText.includes('of probe'))")
        browser.until("[...document.querySelectorAll('#requests .state')].some(one => one.innerText === 'generating')")
        shown = browser.value("""[...document.querySelectorAll('[role=meter]')].map(bar => [
            Number(bar.ariaValueNow), Number(bar.ariaValueMax), bar.ariaLabel,
            [...bar.querySelectorAll('i:not(.held)')].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0)
                / bar.getBoundingClientRect().width])""")
        for now, most, label, width in shown:
            assert width == pytest.approx(min(1.0, now / most), abs=0.01), label
        assert {label for _, _, label, _ in shown} >= {"pool full", "staging", "ring of rank 0", "link probe", "generated tokens"}
        states = browser.value("[...document.querySelectorAll('#prefill .card .state')].map(one => one.innerText)")
        assert states == ["ready", "ready"]
        addresses = browser.value("[...document.querySelectorAll('#prefill .card')].map(card => card.dataset.address)")
        assert set(addresses) == {node.address for node in prefills}
        ids = browser.value("[...document.querySelectorAll('#requests td:first-child')].map(cell => cell.innerText)")
        assert ids and not any("story" in one for one in ids), "this node keeps its clients' ids for itself"
        assert browser.said == []
        own = {url_of(decode), f"{url_of(decode)}status.json"}
        assert {one for one in browser.requested if not one.startswith("data:")} == own

        browser.open(url_of(prefills[0]))
        browser.until("document.querySelectorAll('#decode .card .meters').length === 1")
        assert browser.value("document.querySelectorAll('#prefill .card').length") == 1, "it sees whom it is joined with"
        assert browser.said == []


def test_what_the_page_shows_is_what_status_says(cluster: LocalCluster) -> None:
    content = content_of(cluster.decode_nodes[0])
    assert content["address"] == cluster.decode_nodes[0].address
    assert content["node"]["role"] == "decode" and content["node"]["ready"] is True
    others = {other["address"]: other for other in content["others"]}
    assert set(others) == {node.address for node in cluster.prefill_nodes}
    for other in others.values():
        assert other["error"] == "" and other["status"]["role"] == "prefill"
    lives = {other["status"]["instance"]["incarnation"] for other in others.values()}
    assert {link["peer_incarnation"] for link in content["node"]["links"]} == lives
    written = sum(use["written_bytes"] for other in others.values() for use in other["status"]["ranks"][0]["link_uses"])
    assert written > 0 and all(use["busy_s"] > 0 for o in others.values() for use in o["status"]["ranks"][0]["link_uses"])


def run_top(*arguments: str, cluster: LocalCluster) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry", "top", *arguments, "--insecure"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=cluster.environment | {"NO_COLOR": "1"})


def test_top_once_shows_the_cluster_from_any_of_its_nodes(cluster: LocalCluster) -> None:
    bar = "[█░]{10}"
    with under_load(cluster.decode.address):
        for _ in range(LOOKS):  # a look can meet the load between two of its long requests
            found = run_top("--once", cluster.prefill_nodes[1].address, cluster=cluster)
            assert found.returncode == 0, found.stderr
            lines = [" ".join(line.split()) for line in found.stdout.splitlines()]
            told = [line for line in lines if line.startswith("customer-") and " generating " in line]
            if told:
                break
    assert re.fullmatch(r"kvferry: 2 prefill, 1 decode; 2 links; \d+ requests in flight", lines[0])
    for heading in (
        "nodes",
        "tier node state queued running pool staging up version reason",
        "rings",
        "ring from the watermark on live of watermark quarantine",
        "links",
        "from prefill rank to decode rank lane latency probe now of probe",
        "requests",
        "request stage computed moved generated age prefill decode retries",
    ):
        assert heading in lines, found.stdout
    for node in cluster.prefill_nodes:
        row = rf"prefill {node.address} ready \d+ \d+ {bar} [\d,]+ of 512 {bar} \d+ of \d+ \S+ (s|min) \S+"
        assert [line for line in lines if re.fullmatch(row, line)], found.stdout
        link = rf"{node.address} #0 {cluster.decode.address} #0 ucx/\S+ [\d,]+ us [\d.]+ GB/s {bar} ([\d.]+ GB/s [\d.]+|idle)"
        assert [line for line in lines if re.fullmatch(link, line)], found.stdout
    ring = rf"{cluster.decode.address} #0 [█░┃]{{24}} \S+ (B|KiB|MiB) \S+ MiB [\d,]+"
    assert [line for line in lines if re.fullmatch(ring, line)], found.stdout
    assert told and all(re.search(rf" generating {bar} 40/40 {bar} 1/1 {bar} \d+/400 ", line) for line in told), found.stdout


def test_top_for_programs_and_nodes_that_do_not_answer(cluster: LocalCluster) -> None:
    found = run_top("--json", cluster.decode.address, "127.0.0.1:1", cluster=cluster)
    assert found.returncode == 0, found.stderr
    nodes = {node["address"]: node for node in json.loads(found.stdout)["nodes"]}
    assert set(nodes) == {node.address for node in cluster.nodes} | {"127.0.0.1:1"}
    assert nodes["127.0.0.1:1"]["status"] is None and nodes["127.0.0.1:1"]["error"]
    alone = run_top("--once", "127.0.0.1:1", cluster=cluster)
    assert alone.returncode == exit_codes.UNAVAILABLE and "127.0.0.1:1 unreachable" in " ".join(alone.stdout.split())
    wrong = run_top("--once", "nonsense", cluster=cluster)
    assert wrong.returncode == exit_codes.BAD_INPUT and wrong.stderr.startswith("kvferry top: ")


def rows_of(app: TopApp, name: str) -> dict[str, list[str]]:
    """Of a table, by key, as they are shown."""
    table = app.query_one(f"#{name}", DataTable)
    return {str(row.key.value): [cell.plain for cell in table.get_row(row.key)] for row in table.ordered_rows}


def said(app: TopApp) -> str:
    return "\n".join(line.text for line in app.query_one("#log", RichLog).lines)


@asynccontextmanager
async def top(address: str) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    async with ClusterWatch([address]) as watch:
        app = TopApp(watch, every_s=0.1)
        async with app.run_test(size=(200, 50)) as pilot:
            yield app, pilot


async def shows(pilot: Pilot[None], is_true: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline_s, f"{what}: not within {within_s:g} s\n{said(pilot.app)}"  # type: ignore[arg-type]
        await pilot.pause(0.05)


async def test_top_live_shows_both_tiers_and_what_is_done_with_its_keys(cluster: LocalCluster) -> None:
    decode, prefill = cluster.decode.address, cluster.prefill_nodes[0].address
    with under_load(decode):
        async with top(prefill) as (app, pilot):
            await shows(pilot, lambda: len(rows_of(app, "nodes")) == 3, "all nodes, found from one of them")
            assert [cells[0] for cells in rows_of(app, "nodes").values()] == ["prefill", "prefill", "decode"]
            assert len(rows_of(app, "rings")) == 1 and len(rows_of(app, "links")) == 2
            await shows(pilot, lambda: any(cells[7] for cells in rows_of(app, "links").values()), "what a link moves")
            await shows(pilot, lambda: any("customer-0" in key for key in rows_of(app, "requests")), "a request")

            await pilot.press("p")
            looks = app.num_looks
            await pilot.pause(0.5)
            assert app.num_looks == looks and "PAUSED" in str(app.query_one("#summary", Static).render())
            await pilot.press("p")
            await shows(pilot, lambda: app.num_looks > looks, "it goes on")

            titles = []
            for _ in range(4):
                titles.append(app.query_one("#requests", DataTable).border_title)
                await pilot.press("s")
            assert titles == [f"requests in flight, by {name}" for name in ("age", "stage", "prompt", "node")]

            requests = app.query_one("#requests", DataTable)
            requests.focus()
            await shows(pilot, lambda: select(app, "requests", "customer-0"), "a request to abort")
            await pilot.press("a")
            await shows(pilot, lambda: isinstance(app.screen, Confirm), "the question")
            question = app.screen
            assert isinstance(question, Confirm) and question.question == "Abort request customer-0-story?"
            await pilot.press("n")
            await pilot.pause(0.3)
            assert "customer-0" not in said(app)
            await shows(pilot, lambda: select(app, "requests", "customer-0"), "the request again, or the next of its client")
            await pilot.press("a")
            await pilot.press("y")
            await shows(pilot, lambda: f"request customer-0-story at {decode} is aborted" in said(app), "the abort")


async def test_top_live_drains_a_node_and_has_it_take_requests_again(cluster: LocalCluster) -> None:
    address = cluster.prefill_nodes[1].address
    async with top(cluster.decode.address) as (app, pilot):
        await shows(pilot, lambda: select(app, "nodes", address), "the node")
        await pilot.press("d")
        await pilot.press("y")
        await shows(pilot, lambda: f"{address} has drained" in said(app), "it has drained")
        await shows(pilot, lambda: rows_of(app, "nodes")[address][2] == "draining", "it says so")
        await shows(pilot, lambda: f"prefill node {address} is draining" in said(app), "the alert")
        await pilot.press("d")
        await pilot.press("y")
        await shows(pilot, lambda: f"{address} takes requests again" in said(app), "it drains no more")
        await shows(pilot, lambda: rows_of(app, "nodes")[address][2] == "ready", "it says so")
        await shows(pilot, lambda: f"over: prefill node {address} is draining" in said(app), "the end of the alert")


async def test_top_live_goes_on_while_nodes_go_and_come(cluster: LocalCluster) -> None:
    node = cluster.prefill_nodes[1]
    address = node.address
    async with top(cluster.decode.address) as (app, pilot):
        await shows(pilot, lambda: rows_of(app, "nodes").get(address, [""] * 3)[2] == "ready", "the node")
        node.terminate()
        await shows(pilot, lambda: rows_of(app, "nodes")[address][2] == "unreachable", "that it is gone")
        await shows(pilot, lambda: f"{cluster.decode.address} has lost {address}" in said(app), "the alert")
        assert len(rows_of(app, "links")) == 1
        await asyncio.to_thread(node.reap, 20.0)
        assert cluster.launch("prefill", 1).name == node.name
        await cluster.wait_joined()
        await shows(pilot, lambda: rows_of(app, "nodes")[address][2] == "ready", "that it is back")
        await shows(pilot, lambda: len(rows_of(app, "links")) == 2, "its link")
        await shows(pilot, lambda: not app._alerts.now, "that all is well again")


def select(app: TopApp, name: str, part: str) -> bool:
    """Put the cursor of a table on the row whose key has that part; False: there is none."""
    keys = list(rows_of(app, name))
    found = next((number for number, key in enumerate(keys) if part in key), None)
    if found is None:
        return False
    table = app.query_one(f"#{name}", DataTable)
    table.focus()
    table.move_cursor(row=found, animate=False)
    return True
