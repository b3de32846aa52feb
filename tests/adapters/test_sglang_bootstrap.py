"""The server under a prefill engine's bootstrap port, over real HTTP."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from kvferry.engines import sglang_bootstrap
from kvferry.engines.sglang_bootstrap import (
    BootstrapServer,
    PrefillInfo,
    PrefillLookups,
    PrefillRank,
    engine_key,
    fetch_info,
    register_dp_rank,
    register_rank,
    signature,
)
from transfer.errors import PeerUnreachable, RemoteProtocolError

ALL = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
FIRST = PrefillRank(
    dp_rank=0, dp_size=1, tp_rank=0, tp_size=2, page_size=16, kv_cache_dtype="torch.float32", follows_room=True, http_port=30000,
    address="10.0.0.1:7000",
)  # fmt: skip
SECOND = replace(FIRST, tp_rank=1, address="")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Iterator[BootstrapServer]:
    server = BootstrapServer("127.0.0.1", 0, clock=clock)
    yield server
    server.close()
    assert not server.thread.is_alive()


def url_of(server: BootstrapServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def call(
    method: str, url: str, body: object = None, *, key: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Ask a server.

    Args:
        body: As bytes, or to be JSON.
        key: Signs the call.
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **(headers or {})}
    if key is not None:
        headers["X-Kvferry-Signature"] = signature(key, "/" + url.rpartition("/")[2], data or b"")
    try:
        with urlopen(Request(url, data=data, method=method, headers=headers), timeout=10) as answer:
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


@pytest.mark.parametrize("change", [{"address": "attacker:666"}, {"dp_size": 2, "address": "attacker:666"}, {"tp_size": 1}])
@pytest.mark.parametrize("key", [None, b"a guess"])
def test_a_stranger_changes_nothing_of_an_engine(server: BootstrapServer, change: dict[str, Any], key: bytes | None) -> None:
    register(server, FIRST)
    register(server, SECOND)
    told = fetch_info(url_of(server))
    status, text = call("PUT", url_of(server) + "/route", {**asdict(FIRST), **change}, key=key)
    assert status == 403 and "SGLANG_KVFERRY_BOOTSTRAP_KEY" in text
    assert fetch_info(url_of(server)) == told


def test_a_signature_is_valid_only_for_its_path_and_body(server: BootstrapServer) -> None:
    url, body = url_of(server) + "/route", json.dumps(asdict(FIRST)).encode()
    signed = {"X-Kvferry-Signature": signature(engine_key(), "/route", body)}
    assert call("PUT", url, body.replace(b"10.0.0.1:7000", b"10.0.0.1:7001"), headers=signed)[0] == 403
    assert call("PUT", url, body, headers=signed)[0] == 200


def test_the_processes_that_an_engine_starts_have_its_key() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(engine_key) == engine_key()


def test_a_key_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = engine_key()
    monkeypatch.setenv("SGLANG_KVFERRY_BOOTSTRAP_KEY", "of two hosts")
    assert engine_key() == b"of two hosts" != inherited


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/route", {"attn_tp_size": 2}),
        ("POST", "/register_dp_rank", {"bootstrap_room": 2**64, "dp_rank": 0}),
        ("POST", "/query_dp_ranks", b"[" * 100_000),
        ("POST", "/query_dp_ranks", b"\xff"),
    ],
)
def test_nonsense_is_refused_and_the_server_lives(server: BootstrapServer, method: str, path: str, body: object) -> None:
    assert call(method, url_of(server) + path, body, key=engine_key())[0] == 400
    assert call("GET", url_of(server) + "/health")[0] == 200


def test_bodies_are_bounded(server: BootstrapServer) -> None:
    url = url_of(server) + "/query_dp_ranks"
    assert call("POST", url, {"bootstrap_rooms": [2**63] * 60_000})[0] == 413
    assert call("POST", url, gzip.compress(b" " * 10_000_000), headers={"Content-Encoding": "gzip"})[0] == 400


def rooms(server: BootstrapServer, *asked: int) -> dict[str, int]:
    status, text = call("POST", url_of(server) + "/query_dp_ranks", {"bootstrap_rooms": asked})
    assert status == 200
    answer: dict[str, int] = json.loads(text)
    return answer


def test_a_room_that_is_told_is_changed_by_the_engine_alone(server: BootstrapServer) -> None:
    url, other = url_of(server) + "/register_dp_rank", {"bootstrap_room": 7, "dp_rank": 2}
    assert call("POST", url, {"bootstrap_room": 7, "dp_rank": 1})[0] == 200, "a router may tell it"
    assert call("POST", url, other)[0] == 409 and rooms(server, 7) == {"7": 1}
    assert call("POST", url, other, key=engine_key())[0] == 200 and rooms(server, 7) == {"7": 2}


def test_of_too_many_rooms_the_oldest_are_forgotten(server: BootstrapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_bootstrap, "MAX_ROOMS", 3)
    for room in (1, 2, 3, 1, 4):
        register_dp_rank(url_of(server), room=room, dp_rank=0)
    assert rooms(server, 1, 2, 3, 4) == {"1": 0, "3": 0, "4": 0}


def test_the_server_of_another_backend_is_told_apart() -> None:
    told = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 16, "follow_bootstrap_room": True}

    with (
        answering(json.dumps(told).encode()) as url,
        pytest.raises(RemoteProtocolError, match="bootstrap server of another transfer backend"),
    ):
        fetch_info(url)


@contextmanager
def answering(content: bytes) -> Iterator[str]:
    """The URL of a server that answers once."""

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.end_headers()
            self.wfile.write(content)

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = Thread(target=server.handle_request, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        thread.join(10)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "invalid JSON"),
        (b" " * (1 << 20) + b"{}", "more than 1048576 bytes"),
        (
            b'{"kvferry_addresses": [], "dp_size": 1e400, "follow_bootstrap_room": 1, "page_size": 1, "attn_tp_size": 1}',
            "wrongly",
        ),
    ],
)
def test_an_answer_that_no_engine_gives_is_refused(content: bytes, said: str) -> None:
    with answering(content) as url, pytest.raises(RemoteProtocolError, match=said):
        fetch_info(url)


def test_an_answer_that_comes_a_byte_at_a_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_bootstrap, "CALL_TIMEOUT_S", 0.3)
    is_over = Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Never-Ends: ")
            while not is_over.wait(0.02):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        with pytest.raises(PeerUnreachable, match=r"does not answer within 0\.3 s"):
            fetch_info(f"http://127.0.0.1:{listener.getsockname()[1]}")
        is_over.set()
        thread.join(10)


INFO = PrefillInfo(dp_size=1, follow_bootstrap_room=True, page_size=16, attn_tp_size=1, addresses=("10.0.0.1:7000",))


class Engines:
    """Prefill engines whose answers the test releases."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = Event()
        self.failing: set[str] = set()

    def fetch(self, url: str) -> PrefillInfo:
        self.asked.append(url)
        if url in self.failing:
            raise PeerUnreachable(f"{url} does not answer")
        assert self.answers.wait(10)
        return INFO


@pytest.fixture
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.answers.set()


@pytest.fixture
def lookups(engines: Engines, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefillLookups]:
    monkeypatch.setattr(sglang_bootstrap, "LOOKUP_WAIT_S", 0.001)
    lookups = PrefillLookups(fetch=engines.fetch, clock=clock)
    yield lookups
    lookups.close()


def until(condition: Callable[[], bool]) -> None:
    pause = Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("not within 10 s")


def test_an_engine_that_does_not_answer_is_not_waited_for(lookups: PrefillLookups, engines: Engines) -> None:
    assert not lookups.is_known("a:1") and not lookups.is_known("a:1")
    until(lambda: engines.asked == ["http://a:1"])
    engines.answers.set()
    until(lambda: lookups.is_known("a:1"))
    assert lookups.known == {"a:1": INFO} and engines.asked == ["http://a:1"]
    lookups.forget("a:1")
    until(lambda: lookups.is_known("a:1"))
    assert engines.asked == ["http://a:1"] * 2


def test_engines_that_are_asked_at_a_time_are_bounded(lookups: PrefillLookups, engines: Engines) -> None:
    assert not any(lookups.is_known(f"a:{number}") for number in range(100))
    until(lambda: len(engines.asked) == sglang_bootstrap.MAX_LOOKUPS)
    engines.answers.set()
    until(lambda: all([lookups.is_known(f"a:{number}") for number in range(100)]))
    assert len(engines.asked) == 100


def test_what_is_kept_of_engines_is_bounded(lookups: PrefillLookups, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_bootstrap, "MAX_ENGINES", 2)
    engines.answers.set()
    for name in ("a:1", "b:1", "c:1"):
        until(lambda name=name: lookups.is_known(name))  # type: ignore[misc]
    assert list(lookups.known) == ["b:1", "c:1"]


def test_a_port_that_is_taken_is_an_error_at_once(server: BootstrapServer) -> None:
    with pytest.raises(OSError, match="address already in use"):
        BootstrapServer("127.0.0.1", server.port)


def test_no_server_is_not_yet() -> None:
    with pytest.raises(PeerUnreachable, match="does not answer"):
        fetch_info("http://127.0.0.1:9")
