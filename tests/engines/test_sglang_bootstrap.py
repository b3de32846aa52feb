"""The server under a prefill engine's bootstrap port, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from kvferry.engines.sglang_bootstrap import BootstrapServer, PrefillRank, fetch_info, register_dp_rank, register_rank
from transfer.errors import PeerUnreachable, RemoteProtocolError

ALL = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
FIRST = PrefillRank(
    dp_rank=0, dp_size=1, tp_rank=0, tp_size=2, page_size=16, kv_cache_dtype="torch.float32", follows_room=True, http_port=30000,
    address="10.0.0.1:7000",
)  # fmt: skip
SECOND = replace(FIRST, tp_rank=1, address="")


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    server = BootstrapServer("127.0.0.1", 0)
    yield server
    server.close()
    assert not server.thread.is_alive()


def url_of(server: BootstrapServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def call(method: str, url: str, body: object = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data=data, method=method, headers={"Content-Type": "application/json"}), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def register(server: BootstrapServer, rank: PrefillRank) -> None:
    thread = register_rank(url_of(server), rank)
    thread.join(10)
    assert not thread.is_alive()


def test_decode_learns_where_kvferry_listens_once_all_ranks_are_there(server: BootstrapServer) -> None:
    url = url_of(server)
    assert call("GET", f"{url}/health") == (200, "OK")
    with pytest.raises(PeerUnreachable, match="answers 503"):
        fetch_info(url)
    register(server, SECOND)
    with pytest.raises(PeerUnreachable, match="1 of the prefill engine's ranks have registered"):
        fetch_info(url)
    register(server, FIRST)
    info = fetch_info(url)
    assert (info.addresses, info.dp_size, info.attn_tp_size, info.page_size) == (("10.0.0.1:7000",), 1, 2, 16)
    assert info.follow_bootstrap_room


def test_what_others_of_sglang_read_is_there(server: BootstrapServer) -> None:
    register(server, FIRST)
    register(server, SECOND)
    status, text = call("GET", f"{url_of(server)}/route?{ALL}")
    told = json.loads(text)
    names = ("attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype", "follow_bootstrap_room")
    assert status == 200 and all(name in told for name in names) and told["prefill_http_port"] == 30000
    # A decode engine with another backend asks for the ranks' own ports next.
    status, text = call("GET", f"{url_of(server)}/route?{ALL.replace('target_tp_rank=-1', 'target_tp_rank=0')}")
    assert status == 404 and "--disaggregation-transfer-backend kvferry" in text


def test_each_replica_has_an_address(server: BootstrapServer) -> None:
    replicas = [replace(FIRST, tp_size=1, dp_size=2, dp_rank=rank, address=f"10.0.0.{rank}:7000") for rank in range(2)]
    for rank in replicas:
        register(server, rank)
    assert fetch_info(url_of(server)).addresses == ("10.0.0.0:7000", "10.0.0.1:7000")


def test_another_life_of_the_engine_takes_the_place_of_the_last(server: BootstrapServer) -> None:
    register(server, FIRST)
    register(server, SECOND)
    register(server, replace(FIRST, address="10.0.0.1:9000"))
    assert fetch_info(url_of(server)).addresses == ("10.0.0.1:9000",)
    register(server, replace(FIRST, tp_size=1, address="10.0.0.1:9001"))
    assert fetch_info(url_of(server)).attn_tp_size == 1


def test_which_replica_has_a_request(server: BootstrapServer) -> None:
    url = url_of(server)
    register_dp_rank(url, room=2**62, dp_rank=3)
    assert call("POST", f"{url}/query_dp_ranks", {"bootstrap_rooms": [2**62, 5]}) == (200, json.dumps({str(2**62): 3}))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/route", {"attn_tp_size": 2}),
        ("PUT", "/route", [1]),
        ("PUT", "/route", {**{name: getattr(FIRST, name) for name in FIRST.__slots__}, "tp_rank": 7}),
        ("POST", "/register_dp_rank", {"bootstrap_room": "many"}),
        ("POST", "/query_dp_ranks", {}),
    ],
)
def test_nonsense_is_refused_and_the_server_lives(server: BootstrapServer, method: str, path: str, body: object) -> None:
    assert call(method, url_of(server) + path, body)[0] == 400
    assert call("GET", url_of(server) + "/health")[0] == 200


def test_the_server_of_another_backend_is_told_apart() -> None:
    told = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 16, "follow_bootstrap_room": True}

    class Mooncake(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

    with HTTPServer(("127.0.0.1", 0), Mooncake) as other:
        Thread(target=other.handle_request, daemon=True).start()
        with pytest.raises(RemoteProtocolError, match="bootstrap server of another transfer backend"):
            fetch_info(f"http://127.0.0.1:{other.server_port}")


def test_a_port_that_is_taken_is_an_error_at_once(server: BootstrapServer) -> None:
    with pytest.raises(OSError, match="address already in use"):
        BootstrapServer("127.0.0.1", server.port)


def test_no_server_is_not_yet() -> None:
    with pytest.raises(PeerUnreachable, match="does not answer"):
        fetch_info("http://127.0.0.1:9")
