"""The status page over HTTP, without a browser: its content, and the callers that receive it."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import time

from node_runtime.cluster_view import Seen
from node_runtime.status_page import HEADERS, MAX_REQUESTS, PAGE, Picture, StatusPage
from tests.status.served import DECODE_INCARNATION, REQUESTS, Served, decode_status, prefill_status, read, served, server
from transfer.pb import kvferry_pb2 as pb

__all__ = ["served", "server"]


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
    other = Seen(address="127.0.0.1:7001", status=status, error="", at_s=time.monotonic())
    served.picture = Picture(
        address="127.0.0.1:7003", status=status, requests=pb.ListRequestsResponse(), others={other.address: other}
    )
    _, told, _ = read(f"{served.serve()}status.json")
    assert b"alice" not in told and json.loads(told)["node"]["peers"][1]["breaker"] == "open"
    _, told, _ = read(f"{served.serve(shows_request_ids=True)}status.json")
    assert told.count(b"alice.0f1e") == 2


def test_ids_of_requests_are_not_told_unless_the_operator_says_so(served: Served) -> None:
    served.set_status(decode_status(), REQUESTS)
    _, body, _ = read(f"{served.serve()}status.json")
    assert b"alice" not in body
    first, second, _ = json.loads(body)["requests"]["list"]
    assert re.fullmatch("[0-9a-f]{8}", first["request_id"]) and first["transfer_id"] == "" != first["request_id"]
    assert first["request_id"] != second["request_id"]
    _, again, _ = read(f"{served.serve()}status.json")
    assert json.loads(again)["requests"]["list"][0]["request_id"] != first["request_id"], "nobody can try ids out"
    _, told, _ = read(f"{served.serve(shows_request_ids=True)}status.json")
    assert json.loads(told)["requests"]["list"][0]["request_id"] == "tenant-7/alice"


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
    """DNS rebinding: the browser takes the node for a part of the site, and lets the site's scripts read the answers."""
    served.set_status(decode_status(), REQUESTS)
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


def test_of_many_requests_the_oldest_are_shown_and_all_are_counted(served: Served) -> None:
    many = [pb.RequestStatus(request_id=str(number), age_s=10_000 - number) for number in range(MAX_REQUESTS + 50)]
    served.set_status(decode_status(), many)
    content = json.loads(read(f"{served.serve()}status.json")[1])["requests"]
    assert content["total"] == MAX_REQUESTS + 50 and len(content["list"]) == MAX_REQUESTS
    assert content["list"][0]["age_s"] == 10_000


def test_numbers_that_json_has_no_word_for_do_not_break_it(served: Served) -> None:
    status = decode_status()
    status.links[0].bandwidth_bytes_per_s = float("nan")
    status.links[1].latency_s = float("inf")
    served.set_status(status, [])
    links = json.loads(read(f"{served.serve()}status.json")[1])["node"]["links"]
    assert links[0]["bandwidth_bytes_per_s"] is None and links[1]["latency_s"] is None


def test_the_speed_of_a_link_is_an_average_over_the_last_seconds() -> None:
    now_s, moved = 0.0, (10**9, 1.0, 0.5)

    async def look() -> Picture:
        other = prefill_status()
        use = other.ranks[0].link_uses.add(peer_incarnation=DECODE_INCARNATION, decode_rank=1)
        use.written_bytes, use.busy_s, use.probe_s = moved
        others = {"127.0.0.1:7001": Seen(address="127.0.0.1:7001", status=other)}
        return Picture(address="d:1", status=decode_status(), requests=pb.ListRequestsResponse(), others=others)

    page = StatusPage(look, shows_request_ids=False, clock=lambda: now_s)

    async def speed(at_s: float) -> list[str]:
        nonlocal now_s
        now_s = at_s
        cells = json.loads(await page.json())["shown"]["links"]["rows"][1]
        return [cell if isinstance(cell, str) else cell["text"] for cell in cells[-2:]]

    async def looks() -> None:
        nonlocal moved
        assert await speed(1.0) == ["not known", ""]
        assert await speed(2.0) == ["idle", ""]
        moved = (10**9 + 150_000_000, 1.1, 0.55)
        assert await speed(3.0) == ["1.50 GB/s", "0.50"]
        assert await speed(5.9) == ["1.50 GB/s", "0.50"]
        assert await speed(9.0) == ["idle", ""]

    asyncio.run(looks())
