"""The status page in a real browser, of nodes that are made up: it shows what they say, and that is never more than text."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

import pytest

from node_runtime.health import HealthServer, Readiness
from node_runtime.peer_look_client import PeerSeen
from node_runtime.status_page import HEADERS, KEPT_S, MAX_REQUESTS, PAGE, Picture, StatusPage
from tests.deploy.page.chromium import Tab
from transfer.pb import kvferry_pb2 as pb

HOSTILE: Final = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'`&amp;"
PREFILL_LIFE, DECODE_LIFE = 0x1111, 0x2222


def decode_status(*, reason: str = "", watermark: int = 0, live: int = 0) -> pb.NodeStatus:
    pools = [pb.PoolStatus(group="full", pages=200, reserved=20, bound=50)]
    return pb.NodeStatus(
        role="decode",
        state="ready",
        ready=not reason,
        not_ready_reason=reason,
        version="0.2.0",
        uptime_s=3700,
        running_requests=2,
        instance=pb.InstanceInfo(incarnation=DECODE_LIFE, transport="ucx", shard=pb.ShardInfo(tp_size=2, page_size=32)),
        ranks=[
            pb.RankStatus(
                rank=rank, pools=pools, ring_capacity=1 << 20, ring_live_bytes=live, watermark_position=watermark + (7 << 20)
            )
            for rank in range(2)
        ],
        peers=[
            pb.PeerStatus(address="127.0.0.1:7001", incarnation=PREFILL_LIFE, state="joined", breaker="closed"),
            pb.PeerStatus(address="127.0.0.1:7002", state="lost", reason=reason or "gone", breaker="open", breaker_reason="gone"),
        ],
        links=[
            pb.LinkStatus(
                prefill_rank=0, decode_rank=rank, lane="ucx/shm", latency_s=1e-4, bandwidth_bytes_per_s=(2 - rank) * 3e9,
                peer_incarnation=PREFILL_LIFE,
            )
            for rank in range(2)
        ],
    )  # fmt: skip


def prefill_status() -> pb.NodeStatus:
    return pb.NodeStatus(
        role="prefill",
        state="draining",
        version="0.2.0",
        instance=pb.InstanceInfo(incarnation=PREFILL_LIFE, transport="ucx", shard=pb.ShardInfo(tp_size=1, page_size=16)),
        ranks=[pb.RankStatus(rank=0, staging_slots=8, staging_slots_used=2)],
    )


REQUESTS: Final = [
    pb.RequestStatus(request_id="tenant-7/alice", transfer_id="tenant-7/alice.0f", stage="receiving", prompt_tokens=900,
                     ranks_done=1),
    pb.RequestStatus(request_id="b", stage="generating", prompt_tokens=80, generated_tokens=16, max_new_tokens=64, age_s=3.25),
    pb.RequestStatus(request_id="c", stage="queued", prompt_tokens=8),
]  # fmt: skip


class Served:
    """A real HTTP server of a node, on a thread; what the node says is `picture`."""

    def __init__(self) -> None:
        self.picture = Picture(address="127.0.0.1:7003", status=pb.NodeStatus(), requests=pb.ListRequestsResponse())
        self.num_pictures = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._servers: list[HealthServer] = []

    def start(self) -> None:
        self._thread.start()

    def serve(self, *, shows_request_ids: bool = False, has_page: bool = True, host_names: tuple[str, ...] = ()) -> str:
        """Another server of the same node; returns its URL."""
        page = StatusPage(self._picture, shows_request_ids=shows_request_ids) if has_page else None
        server = HealthServer(lambda: Readiness(is_ready=True), lambda: b"", page=page, host_names=host_names)
        self._servers.append(server)
        port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), self._loop).result(10)
        return f"http://127.0.0.1:{port}/"

    def stop_serving(self) -> None:
        for server in self._servers:
            asyncio.run_coroutine_threadsafe(server.stop(), self._loop).result(10)
        self._servers = []

    def end(self) -> None:
        self.stop_serving()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _picture(self) -> Picture:
        self.num_pictures += 1
        return self.picture

    def says(self, status: pb.NodeStatus, requests: list[pb.RequestStatus], *others: PeerSeen) -> None:
        self.picture = Picture(
            address="127.0.0.1:7003",
            status=status,
            requests=pb.ListRequestsResponse(requests=requests, total=len(requests)),
            others={other.address: other for other in others},
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    one = Served()
    one.start()
    yield one
    one.end()


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    yield server
    server.stop_serving()


def read(url: str) -> tuple[int, bytes, dict[str, str]]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


def rows(browser: Tab, table: str) -> list[list[str]]:
    return list(
        browser.value(
            f"[...document.querySelectorAll('#{table} tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
        )
    )


def bars(browser: Tab) -> list[dict[str, Any]]:
    """Every bar: its label, what it says to those who cannot see it, and its parts as they are laid out, in percent of it."""
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


def test_both_tiers_links_and_requests_are_shown_as_the_nodes_say(browser: Tab, served: Served) -> None:
    other = PeerSeen(address="127.0.0.1:7001", status=prefill_status(), seen_s=time.monotonic())
    served.says(decode_status(watermark=256 << 10, live=128 << 10), REQUESTS, other)
    url = served.serve()
    browser.start_anew()
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
    assert first[:4] == ["127.0.0.1:7001 #0", "127.0.0.1:7003 #0", "ucx/shm", "100 µs"] and first[5] == "6.00 GB/s"
    assert second[5] == "3.00 GB/s" and second[7] == "not known", "its prefill node does not say what it has written"
    shown = rows(browser, "requests")
    assert [row[1] for row in shown] == ["receiving", "generating", "queued"]
    assert [row[3] for row in shown] == ["received by ranks 1 of 2", "generated tokens 16 of 64", ""]
    assert [row[4] for row in shown] == ["900", "80", "8"]

    for label, width in (
        ("pool full", [25.0, 10.0]),
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
    assert browser.said == []


def test_a_ring_whose_live_bytes_go_around_its_end_is_drawn_at_both_ends(browser: Tab, served: Served) -> None:
    served.says(decode_status(watermark=768 << 10, live=512 << 10), [])
    browser.open(served.serve())
    browser.until("document.querySelectorAll('.card').length === 3")
    parts = bar(browser, "ring of rank 0")["parts"]
    assert parts == [pytest.approx([75.0, 25.0], abs=0.7), pytest.approx([0.0, 25.0], abs=0.7)]


def test_a_link_in_use_is_compared_with_its_probe(browser: Tab, served: Served) -> None:
    def look(num_bytes: int, busy_s: float, probe_s: float) -> None:
        status = prefill_status()
        status.ranks[0].link_uses.add(
            peer_incarnation=DECODE_LIFE, decode_rank=1, written_bytes=num_bytes, busy_s=busy_s, probe_s=probe_s
        )
        served.says(decode_status(), [], PeerSeen(address="127.0.0.1:7001", status=status, seen_s=time.monotonic()))

    look(10**9, 1.0, 0.5)
    browser.open(served.serve())
    browser.until("[...document.querySelectorAll('#links td')].some(cell => cell.innerText === 'idle')")
    look(10**9 + 150_000_000, 1.1, 0.55)
    browser.until("[...document.querySelectorAll('#links td')].some(cell => cell.innerText.includes('of probe'))")
    assert rows(browser, "links")[1][7] == "1.50 GB/s, 0.50 of probe"
    assert bar(browser, "link now")["parts"][0][1] == pytest.approx(50.0, abs=0.7)


def test_what_strangers_wrote_is_shown_as_text(browser: Tab, served: Served) -> None:
    """In every place where a node passes on what somebody else chose."""
    status = decode_status(reason=HOSTILE)
    status.version = status.instance.transport = status.instance.version = HOSTILE
    status.peers[0].address = status.peers[1].breaker_reason = status.links[0].lane = HOSTILE
    status.ranks[0].pools[0].group = HOSTILE
    hostile = prefill_status()
    hostile.state = hostile.not_ready_reason = hostile.version = HOSTILE
    served.says(
        status,
        [pb.RequestStatus(request_id=HOSTILE, transfer_id=HOSTILE, stage=HOSTILE, peer=HOSTILE)],
        PeerSeen(address=HOSTILE, status=hostile),
        PeerSeen(address="127.0.0.1:7002", error=HOSTILE),
    )
    browser.start_anew()
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
    assert browser.said == []


def test_the_browser_itself_refuses_what_is_not_the_page_s_own(browser: Tab, served: Served) -> None:
    """If a text were ever taken for HTML: neither its script runs, nor does it reach anybody."""
    served.says(decode_status(), [])
    browser.open(served.serve())
    browser.until("document.querySelectorAll('.card').length === 3")
    before = len(browser.said)
    browser.value("""const harm = '<img src="http://127.0.0.1:9/x" onerror="window.harmed = 1">';
        document.body.insertAdjacentHTML('beforeend', harm);
        const made = document.createElement('script'); made.textContent = 'window.harmed = 2'; document.body.append(made);
        fetch('http://127.0.0.1:9/y').catch(() => { window.isRefused = true; }); 0""")
    browser.until("window.isRefused")
    assert browser.value("window.harmed === undefined")
    said = "\n".join(browser.said[before:])
    assert said.count("Content Security Policy") >= 3, said
    del browser.said[before:]


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_it_is_readable_on_a_phone_in_both_colours(browser: Tab, served: Served, is_dark: bool) -> None:
    long_name = "prefill-node-0.prefill-nodes.inference.svc.cluster.local:7001"
    status = decode_status()
    status.peers[0].address = long_name
    served.says(status, REQUESTS, PeerSeen(address=long_name, status=prefill_status()))
    browser.size(390, 844)
    browser.use_dark(is_dark)
    browser.open(served.serve())
    browser.until("document.querySelectorAll('.card').length === 3")
    assert browser.value("document.documentElement.scrollWidth") <= 390, "only tables scroll sideways, by themselves"
    ink, back = browser.value(
        "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name].match(/[0-9]+/g).map(Number))"
    )
    assert (sum(ink) > sum(back)) is is_dark and abs(sum(ink) - sum(back)) > 400
    browser.size(1280, 900)
    browser.use_dark(False)


def test_a_node_that_answers_no_more_is_said(browser: Tab, served: Served) -> None:
    served.says(decode_status(), [])
    url = served.serve()
    browser.open(url)
    browser.until("document.querySelectorAll('.card').length === 3")
    before = len(browser.said)
    served.stop_serving()
    browser.until("document.getElementById('trouble').innerText.includes('does not answer')")
    browser.value("(document.getElementById('pause').click(), 0)")
    del browser.said[before:]  # the refused connection, which the page has told


def test_the_page_is_one_file_that_asks_for_nothing_else(served: Served) -> None:
    url = served.serve()
    status, body, headers = read(url)
    assert (status, body, headers["Content-Type"]) == (200, PAGE, "text/html; charset=utf-8")
    for name, value in HEADERS.items():
        assert headers[name] == value
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert not re.search(
        rb"https?:|//[a-z]|@import|url\(|\bsrc=|innerHTML|insertAdjacentHTML|outerHTML|eval\(|document\.write", body
    )
    assert len(body) < 32 << 10


def test_a_breakers_reason_which_may_name_a_request_is_not_told_unless_the_operator_says_so(served: Served) -> None:
    status = decode_status()
    status.peers[1].breaker_reason = "decode rank 0: chunk 3 of request alice.0f1e from prefill rank 0 arrived broken"
    other = PeerSeen(address="127.0.0.1:7001", status=status, error="", seen_s=time.monotonic())
    served.picture = Picture(
        address="127.0.0.1:7003", status=status, requests=pb.ListRequestsResponse(), others={other.address: other}
    )
    _, told, _ = read(f"{served.serve()}status.json")
    assert b"alice" not in told and json.loads(told)["node"]["peers"][1]["breaker"] == "open"
    _, told, _ = read(f"{served.serve(shows_request_ids=True)}status.json")
    assert told.count(b"alice.0f1e") == 2


def test_ids_of_requests_are_not_told_unless_the_operator_says_so(served: Served) -> None:
    served.says(decode_status(), REQUESTS)
    _, body, _ = read(f"{served.serve()}status.json")
    assert b"alice" not in body
    first, second, _ = json.loads(body)["requests"]["list"]
    assert re.fullmatch("[0-9a-f]{8}", first["request_id"]) and first["transfer_id"] == "" != first["request_id"]
    assert first["request_id"] != second["request_id"]
    _, again, _ = read(f"{served.serve()}status.json")
    assert json.loads(again)["requests"]["list"][0]["request_id"] != first["request_id"], "nobody can try ids out"
    _, told, _ = read(f"{served.serve(shows_request_ids=True)}status.json")
    assert json.loads(told)["requests"]["list"][0]["request_id"] == "tenant-7/alice"


def test_a_node_without_ranks_and_numbers_that_are_none_are_shown_all_the_same(browser: Tab, served: Served) -> None:
    status = pb.NodeStatus(role="decode", state="starting", not_ready_reason="the node is starting", uptime_s=float("nan"))
    status.peers.add(address="127.0.0.1:7001", state="joined")
    strange = prefill_status()
    strange.uptime_s = float("inf")
    served.says(status, [], PeerSeen(address="127.0.0.1:7001", status=strange))
    browser.open(served.serve())
    browser.until("document.querySelectorAll('.card').length === 2")
    assert browser.value("document.getElementById('trouble').innerText") == ""
    assert "the node is starting" in browser.value("document.querySelector('#decode .card').innerText")


def under_name(url: str, host: str) -> tuple[int, str]:
    """How the page's state is answered to a browser that has reached the node by that name."""
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=10)
    try:
        connection.request("GET", "/status.json", headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_website_that_names_the_node_as_its_own_reads_nothing(served: Served) -> None:
    """DNS rebinding: the browser takes the node for a part of the site, and so lets its scripts read what the node answers."""
    served.says(decode_status(), REQUESTS)
    url = served.serve(host_names=("Kv-7.Example",))
    for name in ("evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1"):
        code, text = under_name(url, name)
        assert code == 403 and "status_page.host_names" in text and "decode" not in text, name
    for name in ("127.0.0.1:8080", "10.1.2.3", "[::1]:7180", "localhost:8080", "kv-7.example", "KV-7.example:7180"):
        assert under_name(url, name)[0] == 200, name
    metrics = http.client.HTTPConnection(url.split("/")[2], timeout=10)
    metrics.request("GET", "/healthz", headers={"Host": "kvferry-decode.kvferry.svc"})
    assert metrics.getresponse().status == 200, "probes and scrapers come by any name"
    metrics.close()


def test_without_the_page_there_is_neither_it_nor_its_state(served: Served) -> None:
    url = served.serve(has_page=False)
    assert [read(f"{url}{path}")[0] for path in ("", "status.json", "healthz")] == [404, 404, 200]


def test_many_who_look_cost_as_much_as_one(served: Served) -> None:
    served.says(decode_status(), REQUESTS)
    url = f"{served.serve()}status.json"
    before, begun_s = served.num_pictures, time.monotonic()
    bodies = [read(url)[1] for _ in range(100)]
    elapsed_s = time.monotonic() - begun_s
    assert all(json.loads(body)["node"]["role"] == "decode" for body in bodies)
    assert served.num_pictures - before <= elapsed_s / KEPT_S + 1


def test_of_many_requests_the_oldest_are_shown_and_all_are_counted(served: Served) -> None:
    many = [pb.RequestStatus(request_id=str(number), age_s=10_000 - number) for number in range(MAX_REQUESTS + 50)]
    served.says(decode_status(), many)
    content = json.loads(read(f"{served.serve()}status.json")[1])["requests"]
    assert content["total"] == MAX_REQUESTS + 50 and len(content["list"]) == MAX_REQUESTS
    assert content["list"][0]["age_s"] == 10_000


def test_numbers_that_json_has_no_word_for_do_not_break_it(served: Served) -> None:
    status = decode_status()
    status.links[0].bandwidth_bytes_per_s = float("nan")
    status.links[1].latency_s = float("inf")
    served.says(status, [])
    links = json.loads(read(f"{served.serve()}status.json")[1])["node"]["links"]
    assert links[0]["bandwidth_bytes_per_s"] is None and links[1]["latency_s"] is None
