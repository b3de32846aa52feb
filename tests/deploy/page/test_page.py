"""The status page of synthetic nodes in a real browser shows their status, and shows it only as text."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import pytest

from node_runtime.cluster_view import Seen
from node_runtime.status_page import KEPT_S
from tests.deploy.page.chromium import Tab
from tests.status.served import DECODE_INCARNATION, REQUESTS, Served, decode_status, prefill_status, served, server
from transfer.pb import kvferry_pb2 as pb

__all__ = ["served", "server"]

HOSTILE: Final = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'`&amp;"


def rows(browser: Tab, table: str) -> list[list[str]]:
    return list(
        browser.value(
            f"[...document.querySelectorAll('#{table} tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
        )
    )


def bars(browser: Tab) -> list[dict[str, Any]]:
    """Return all bars: label, ARIA values, and the layout of their parts and marks in percent of the bar."""
    return list(
        browser.value("""[...document.querySelectorAll('[role=meter]')].map(bar => ({
            label: bar.ariaLabel, now: Number(bar.ariaValueNow), most: Number(bar.ariaValueMax),
            parts: [...bar.querySelectorAll('i')].map(part => {
                const all = bar.getBoundingClientRect(), own = part.getBoundingClientRect();
                return [100 * (own.left - all.left) / all.width, 100 * own.width / all.width];
            }),
            marks: [...bar.querySelectorAll('b')].map(mark => {
                const all = bar.getBoundingClientRect();
                return 100 * (mark.getBoundingClientRect().left - all.left) / all.width;
            }),
        }))""")
    )


def bar(browser: Tab, label: str) -> dict[str, Any]:
    return next(one for one in bars(browser) if one["label"] == label)


def test_both_tiers_links_and_requests_are_shown_as_reported(browser: Tab, served: Served) -> None:
    other = Seen(address="127.0.0.1:7001", status=prefill_status(), at_s=time.monotonic())
    served.set_status(decode_status(watermark=256 << 10, live=128 << 10), REQUESTS, other)
    url = served.serve()
    browser.reset()
    browser.open(url)
    browser.until("document.querySelectorAll('.card').length === 3")
    assert browser.value("document.title") == "kvferry: decode 127.0.0.1:7003"
    cards = browser.value("[...document.querySelectorAll('#prefill .card')].map(card => [card.dataset.address, card.innerText])")
    assert [address for address, _ in cards] == ["127.0.0.1:7001", "127.0.0.1:7002"]
    assert "draining" in cards[0][1] and "2 of 8 slots" in cards[0][1]
    assert "lost" in cards[1][1] and "breaker open" in cards[1][1] and "gone" in cards[1][1]
    (own,) = browser.value("[...document.querySelectorAll('#decode .card')].map(card => card.innerText)")
    assert "this node" in own and "TP 2, pages of 32, ucx, version 0.2.0, up 62 min" in own and "100 + 40 of 400" in own
    assert "128.0 KiB of 1.0 MiB" in own

    first, second = rows(browser, "links")
    assert first[:4] == ["127.0.0.1:7001 #0", "127.0.0.1:7003 #0", "ucx/shm", "100 us"] and first[5] == "6.00 GB/s"
    assert second[5] == "3.00 GB/s" and second[7] == "not known", "the prefill node does not report the bytes of this link"
    shown = rows(browser, "requests")
    assert [row[1] for row in shown] == ["receiving", "generating", "queued"]
    assert [row[3] for row in shown] == ["received by ranks 1 of 2", "generated tokens 16 of 64", ""]
    assert [row[4] for row in shown] == ["900", "80", "8"]

    for label, width in (
        ("KV pool", [25.0, 10.0]),
        ("staging", [25.0]),
        ("ring of rank 0", [12.5]),
        ("generated tokens", [25.0]),
    ):
        found = bar(browser, label)
        assert [size for _, size in found["parts"]] == pytest.approx(width, abs=0.7), found
        assert 100 * found["now"] / found["most"] == pytest.approx(width[0], abs=0.1)
    ring = bar(browser, "ring of rank 1")
    assert ring["parts"][0][0] == pytest.approx(25.0, abs=0.7) and ring["marks"] == [pytest.approx(25.0, abs=0.7)]
    assert [one["parts"][0][1] for one in bars(browser) if one["label"] == "link probe"] == pytest.approx([100.0, 50.0], abs=0.7)

    assert {one for one in browser.requested if not one.startswith("data:")} == {url, f"{url}status.json"}
    assert browser.messages == []


def test_a_link_in_use_is_compared_with_its_probe(browser: Tab, served: Served) -> None:
    """The page's clock moves with the reports, so that both are in its window however slow the browser is."""
    now_s = 0.0

    def report(num_bytes: int, busy_s: float, probe_s: float) -> None:
        nonlocal now_s
        status = prefill_status()
        status.ranks[0].link_uses.add(
            peer_incarnation=DECODE_INCARNATION, decode_rank=1, written_bytes=num_bytes, busy_s=busy_s, probe_s=probe_s
        )
        served.set_status(decode_status(), [], Seen(address="127.0.0.1:7001", status=status, at_s=now_s))
        now_s += KEPT_S  # until then, the page repeats its last content

    report(10**9, 1.0, 0.5)
    browser.reset()
    browser.open(served.serve(clock=lambda: now_s))
    browser.until("[...document.querySelectorAll('#links td')].some(cell => cell.innerText === 'not known')")
    report(10**9, 1.0, 0.5)
    browser.until("[...document.querySelectorAll('#links td')].some(cell => cell.innerText === 'idle')")
    report(10**9 + 150_000_000, 1.1, 0.55)
    browser.until("document.querySelector('[aria-label=\"link now\"]')")
    assert rows(browser, "links")[1][7:] == ["1.50 GB/s", "0.50"]
    assert bar(browser, "link now")["parts"][0][1] == pytest.approx(50.0, abs=0.7)


def test_html_in_reported_values_is_shown_as_text(browser: Tab, served: Served) -> None:
    """HTML is in every field that a node receives from elsewhere."""
    status = decode_status(reason=HOSTILE)
    status.version = status.instance.transport = status.instance.version = HOSTILE
    status.peers[0].address = status.peers[1].breaker_reason = status.links[0].lane = HOSTILE
    status.ranks[0].pools[0].group = HOSTILE
    hostile = prefill_status()
    hostile.state = hostile.not_ready_reason = hostile.version = HOSTILE
    served.set_status(
        status,
        [pb.RequestStatus(request_id=HOSTILE, transfer_id=HOSTILE, stage=HOSTILE, peer=HOSTILE)],
        Seen(address=HOSTILE, status=hostile),
        Seen(address="127.0.0.1:7002", error=HOSTILE),
    )
    browser.reset()
    url = served.serve(shows_request_ids=True)
    browser.open(url)
    browser.until(
        "document.querySelectorAll('#requests tbody tr').length === 1 && document.querySelectorAll('.card').length === 3"
    )
    assert browser.value("document.images.length") == 0
    assert browser.value("document.scripts.length") == 1
    assert rows(browser, "requests")[0][0] == HOSTILE
    assert (
        browser.value(f"[...document.querySelectorAll('.reason')].filter(one => one.innerText === {json.dumps(HOSTILE)}).length")
        >= 2
    )
    assert {one for one in browser.requested if not one.startswith("data:")} == {url, f"{url}status.json"}
    assert browser.messages == []


def test_the_browser_blocks_scripts_and_requests_that_the_policy_forbids(browser: Tab, served: Served) -> None:
    """The policy is a second defence: even if text became HTML, its script would not run and its requests would be blocked."""
    served.set_status(decode_status(), [])
    browser.open(served.serve())
    browser.until("document.querySelectorAll('.card').length === 3")
    before = len(browser.messages)
    browser.value("""const harm = '<img src="http://127.0.0.1:9/x" onerror="window.harmed = 1">';
        document.body.insertAdjacentHTML('beforeend', harm);
        const made = document.createElement('script'); made.textContent = 'window.harmed = 2'; document.body.append(made);
        fetch('http://127.0.0.1:9/y').catch(() => { window.isRefused = true; }); 0""")
    browser.until("window.isRefused")
    assert browser.value("window.harmed === undefined")
    messages = "\n".join(browser.messages[before:])
    assert messages.count("Content Security Policy") >= 3, messages
    del browser.messages[before:]


def test_the_page_reports_a_node_that_stops_answering(browser: Tab, served: Served) -> None:
    served.set_status(decode_status(), [])
    url = served.serve()
    browser.open(url)
    browser.until("document.querySelectorAll('.card').length === 3")
    before = len(browser.messages)
    served.stop_serving()
    browser.until("document.getElementById('trouble').innerText.includes('does not answer')")
    browser.value("(document.getElementById('pause').click(), 0)")
    del browser.messages[before:]  # the error of the refused connection


def test_nodes_without_ranks_or_with_non_finite_numbers_are_shown(browser: Tab, served: Served) -> None:
    status = pb.NodeStatus(role="decode", state="starting", not_ready_reason="the node is starting", uptime_s=float("nan"))
    status.peers.add(address="127.0.0.1:7001", state="joined")
    strange = prefill_status()
    strange.uptime_s = float("inf")
    served.set_status(status, [], Seen(address="127.0.0.1:7001", status=strange))
    browser.open(served.serve())
    browser.until("document.querySelectorAll('.card').length === 2")
    assert browser.value("document.getElementById('trouble').innerText") == ""
    assert "the node is starting" in browser.value("document.querySelector('#decode .card').innerText")
