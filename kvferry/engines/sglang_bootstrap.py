"""The HTTP server under a prefill engine's bootstrap port, and what decode engines learn from it.

SGLang gives every request the host and port of this server and asks it, before anything else, how the prefill engine is cut. Here
it also says where the engine's kvferry listens (PrefillControl); the KV and everything about it go there. The routes are those
that SGLang and its routers use: ``/route``, ``/register_dp_rank``, ``/query_dp_ranks``, ``/health``.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import structlog
from aiohttp import web

from transfer.errors import PeerUnreachable, RemoteProtocolError

CALL_TIMEOUT_S: Final = 5.0
REGISTER_TRIES: Final = 60
DP_RANK_KEPT_S: Final = 600.0
MAX_ROOMS: Final = 65_536
START_TIMEOUT_S: Final = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRank:
    """What one scheduler of a prefill engine says of itself.

    Args:
        dp_rank, dp_size: Which of the engine's replicas it belongs to.
        tp_rank, tp_size: Its place among those that share a prompt's attention heads.
        follows_room: Whether a request's replica is its room modulo `dp_size`.
        http_port: Of the engine's own API.
        address: host:port of its replica's PrefillControl; empty on all but the replica's first rank.
    """

    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    page_size: int
    kv_cache_dtype: str
    follows_room: bool
    http_port: int
    address: str = ""

    def __post_init__(self) -> None:
        for name, rank, size in (("dp", self.dp_rank, self.dp_size), ("tp", self.tp_rank, self.tp_size)):
            if not 0 <= rank < size:
                raise ValueError(f"{name}_rank is {rank}; with {name}_size {size} it must be in [0, {size})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillInfo:
    """What a decode engine knows of a prefill engine. SGLang's queues read `dp_size` and `follow_bootstrap_room`."""

    dp_size: int
    follow_bootstrap_room: bool
    page_size: int
    attn_tp_size: int
    addresses: tuple[str, ...]  # of PrefillControl, for each replica


class BootstrapServer:
    """Serves until `close()`, on a thread of its own.

    Raises:
        OSError: The port cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._ranks: dict[tuple[int, int], PrefillRank] = {}
        self._dp_ranks: dict[int, tuple[int, float]] = {}  # room -> replica, and until when it is kept
        self._loop = asyncio.new_event_loop()
        started: threading.Event = threading.Event()
        failed: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, args=(started, failed), name="kvferry-bootstrap", daemon=True)
        self.thread.start()
        if not started.wait(START_TIMEOUT_S):
            raise OSError(f"no server on {host}:{port} within {START_TIMEOUT_S:g} s")
        if failed:
            raise failed[0]

    def close(self) -> None:
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join(CALL_TIMEOUT_S)

    def _run(self, started: threading.Event, failed: list[BaseException]) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_put("/route", self._register)
        app.router.add_get("/route", self._tell)
        app.router.add_post("/register_dp_rank", self._register_dp_rank)
        app.router.add_post("/query_dp_ranks", self._query_dp_ranks)
        runner = web.AppRunner(app, access_log=None)
        try:
            self._loop.run_until_complete(runner.setup())
            site = web.TCPSite(runner, host=self.host, port=self.port)
            self._loop.run_until_complete(site.start())
            self.port = runner.addresses[0][1]
            started.set()
            self._loop.run_forever()
        except BaseException as error:
            failed.append(error)
            started.set()
        finally:
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _register(self, request: web.Request) -> web.Response:
        try:
            rank = PrefillRank(**await request.json())
        except (TypeError, ValueError) as error:
            return web.Response(status=400, text=f"not a rank of a prefill engine with kvferry: {error}")
        others = [one for one in self._ranks.values() if (one.dp_size, one.tp_size) != (rank.dp_size, rank.tp_size)]
        if others:
            self._ranks.clear()  # another life of the engine, cut in another way
        self._ranks[rank.dp_rank, rank.tp_rank] = rank
        return web.Response(text="OK")

    async def _tell(self, request: web.Request) -> web.Response:
        first = self._ranks.get((0, 0))
        expected = first.dp_size * first.tp_size if first is not None else 1
        if first is None or len(self._ranks) < expected:
            return web.Response(status=503, text=f"{len(self._ranks)} of the prefill engine's ranks have registered")
        if any(request.query.get(name, "-1") != "-1" for name in ("target_tp_rank", "prefill_dp_rank")):
            text = "this prefill engine moves KV by kvferry; decode needs --disaggregation-transfer-backend kvferry, too"
            return web.Response(status=404, text=text)
        return web.json_response(
            {
                "attn_tp_size": first.tp_size,
                "attn_cp_size": 1,
                "dp_size": first.dp_size,
                "pp_size": 1,
                "page_size": first.page_size,
                "kv_cache_dtype": first.kv_cache_dtype,
                "follow_bootstrap_room": first.follows_room,
                "prefill_http_port": first.http_port,
                "kvferry_addresses": [self._ranks[replica, 0].address for replica in range(first.dp_size)],
            }
        )

    async def _register_dp_rank(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            room, dp_rank = int(body["bootstrap_room"]), int(body["dp_rank"])
        except (KeyError, TypeError, ValueError) as error:
            return web.Response(status=400, text=f"bootstrap_room and dp_rank are needed: {error!r}")
        now = time.monotonic()
        if len(self._dp_ranks) >= MAX_ROOMS:
            self._dp_ranks = {kept: place for kept, place in self._dp_ranks.items() if place[1] > now}
        self._dp_ranks[room] = (dp_rank, now + DP_RANK_KEPT_S)
        return web.Response(text="OK")

    async def _query_dp_ranks(self, request: web.Request) -> web.Response:
        try:
            rooms = [int(room) for room in (await request.json())["bootstrap_rooms"]]
        except (KeyError, TypeError, ValueError) as error:
            return web.Response(status=400, text=f"bootstrap_rooms is needed: {error!r}")
        return web.json_response({str(room): self._dp_ranks[room][0] for room in rooms if room in self._dp_ranks})


def register_rank(url: str, rank: PrefillRank) -> threading.Thread:
    """Tell the bootstrap server of a rank, as soon as it is up; it starts beside the ranks.

    Args:
        url: ``http://host:port``.

    Returns:
        The thread that does it. It gives up after a minute, says so in the log, and the engine is then never asked for anything.
    """
    body = {name: getattr(rank, name) for name in PrefillRank.__dataclass_fields__}

    def register() -> None:
        for _ in range(REGISTER_TRIES):
            try:
                _call("PUT", f"{url}/route", body)
                return
            except PeerUnreachable:
                time.sleep(1.0)
            except RemoteProtocolError as error:
                log.error("bootstrap_refused", url=url, reason=str(error))
                return
        log.error("bootstrap_not_registered", url=url, seconds=REGISTER_TRIES)

    thread = threading.Thread(target=register, name="kvferry-register", daemon=True)
    thread.start()
    return thread


def register_dp_rank(url: str, *, room: int, dp_rank: int) -> None:
    """Tell which replica has a request; see `_call` for what it raises."""
    _call("POST", f"{url}/register_dp_rank", {"bootstrap_room": room, "dp_rank": dp_rank})


def fetch_info(url: str) -> PrefillInfo:
    """What the bootstrap server at `url` says of its prefill engine.

    Raises:
        PeerUnreachable: It is not there, or not all ranks have told it of themselves.
        RemoteProtocolError: It is another backend's, or says what cannot be.
    """
    query = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    told = _call("GET", f"{url}/route?{query}", None)
    if not isinstance(told, Mapping) or "kvferry_addresses" not in told:
        raise RemoteProtocolError(f"{url} is the bootstrap server of another transfer backend; prefill needs kvferry, too")
    try:
        addresses = tuple(map(str, told["kvferry_addresses"]))
        info = PrefillInfo(
            dp_size=int(told["dp_size"]),
            follow_bootstrap_room=bool(told["follow_bootstrap_room"]),
            page_size=int(told["page_size"]),
            attn_tp_size=int(told["attn_tp_size"]),
            addresses=addresses,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"{url} describes its prefill engine wrongly: {error!r}") from error
    if len(info.addresses) != info.dp_size or not all(info.addresses):
        raise RemoteProtocolError(
            f"{url} names {len(info.addresses)} addresses of kvferry; the engine has {info.dp_size} replicas"
        )
    return info


def _call(method: str, url: str, body: object) -> Any:
    """The answer, parsed where it is JSON.

    Raises:
        PeerUnreachable: No answer, or one that says "not yet".
        RemoteProtocolError: A refusal, or an answer that is none.
    """
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
            text = answer.read(1 << 20).decode("utf-8", "replace")
            return json.loads(text) if "json" in answer.headers.get("Content-Type", "") else text
    except HTTPError as error:
        said = error.read(1000).decode("utf-8", "replace")
        kind = PeerUnreachable if error.code == 503 else RemoteProtocolError
        raise kind(f"{url} answers {error.code}: {said}") from None
    except (OSError, ValueError) as error:
        raise PeerUnreachable(f"{url} does not answer: {error}") from None
