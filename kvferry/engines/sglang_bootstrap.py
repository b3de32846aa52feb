"""The HTTP server on a prefill engine's bootstrap port, and its clients in prefill and decode engines.

SGLang gives every request the host and port of this server, and asks it first how the prefill engine is sharded. The answer also
has the address of the engine's kvferry (PrefillControl), which serves the KV. The routes are those of SGLang and its routers:
``/route``, ``/register_dp_rank``, ``/query_dp_ranks``, ``/health``.

Any client that reaches the port can query it. Only the engine's own processes can register a rank or change an entry. They sign
with a key that SGLang's launcher shares with the processes that it starts, see `engine_key`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import multiprocessing
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, Final

import aiohttp
import structlog
from aiohttp import web

from transfer.errors import PeerUnreachable, RemoteProtocolError, TransferError
from transfer.layout import MAX_RANKS

CALL_TIMEOUT_S: Final = 5.0
REGISTER_TRIES: Final = 60
START_TIMEOUT_S: Final = 10.0

DP_RANK_KEPT_S: Final = 600.0
MAX_ROOMS: Final = 65_536
MAX_BODY_BYTES: Final = 1 << 20
"""Largest body of a call, enough for a query of some 50,000 rooms."""

MAX_ANSWER_BYTES: Final = 1 << 20
MAX_LOOKUPS: Final = 32
"""Prefill engines that are queried at a time."""

MAX_ENGINES: Final = 1024
"""Prefill engines whose answers are kept, and the same number of engines whose failures are kept."""

RETRY_LOOKUP_S: Final = 2.0
"""Shortest pause before a prefill engine is queried again after a failure. SGLang gives up a request after 15 s."""

LOOKUP_WAIT_S: Final = 0.02
LOOKUP_WAIT_SHARE: Final = 0.05
"""Longest wait of a scheduler for an answer, and the largest share of its time for waits. Most answers arrive within
milliseconds, and SGLang checks again only after a second."""

KEY: Final = "SGLANG_KVFERRY_BOOTSTRAP_KEY"
"""Environment variable with the key of `engine_key`, for an engine whose launcher does not start its schedulers."""

SIGNATURE: Final = "X-Kvferry-Signature"
_MAX_ROOM: Final = 2**64 - 1

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRank:
    """One scheduler of a prefill engine.

    Args:
        dp_rank, dp_size: Replica of the engine.
        tp_rank, tp_size: Shard of the attention heads.
        follows_room: Whether a request's replica is its room modulo `dp_size`.
        http_port: Port of the engine's own API.
        address: host:port of the replica's PrefillControl; empty on all but its first rank.
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
    """A prefill engine, as a decode engine knows it. SGLang's queues read `dp_size` and `follow_bootstrap_room`."""

    dp_size: int
    follow_bootstrap_room: bool
    page_size: int
    attn_tp_size: int
    addresses: tuple[str, ...]  # addresses of PrefillControl, one for each replica


def engine_key() -> bytes:
    """Return the key that the processes of one engine share.

    Python generates a random key in each program and passes it to the processes that `multiprocessing` starts. The key is neither
    on disk nor in an environment. An engine that is started again has another key.
    """
    given = os.environ.get(KEY)
    return given.encode() if given else bytes(multiprocessing.current_process().authkey)


def signature(key: bytes, path: str, content: bytes) -> str:
    """Return the signature that proves that a call comes from a process of the engine."""
    return hmac.new(key, f"kvferry bootstrap {path}\n".encode() + content, hashlib.sha256).hexdigest()


class BootstrapServer:
    """Serve on a separate thread until `close()`.

    Raises:
        OSError: The port cannot be opened.
    """

    def __init__(self, host: str, port: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.host = host
        self.port = port
        self._key = engine_key()
        self._clock = clock
        self._ranks: dict[tuple[int, int], PrefillRank] = {}
        self._rooms: OrderedDict[int, _Room] = OrderedDict()  # the oldest first
        self._loop = asyncio.new_event_loop()
        opened: Future[int] = Future()
        self.thread = threading.Thread(target=self._run, args=(opened,), name="kvferry-bootstrap", daemon=True)
        self.thread.start()
        try:
            self.port = opened.result(START_TIMEOUT_S)
        except TimeoutError:
            raise OSError(f"no server on {host}:{port} within {START_TIMEOUT_S:g} s") from None

    def close(self) -> None:
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join(CALL_TIMEOUT_S)

    def _run(self, opened: Future[int]) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_put("/route", self._register)
        app.router.add_get("/route", self._tell)
        app.router.add_post("/register_dp_rank", self._register_dp_rank)
        app.router.add_post("/query_dp_ranks", self._query_dp_ranks)
        runner = web.AppRunner(app, access_log=None, auto_decompress=False)
        try:
            self._loop.run_until_complete(runner.setup())
            site = web.TCPSite(runner, host=self.host, port=self.port)
            self._loop.run_until_complete(site.start())
            opened.set_result(runner.addresses[0][1])
            self._loop.run_forever()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)
        finally:
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _register(self, request: web.Request) -> web.Response:
        content = await request.read()
        if not self._is_of_engine(request, content):
            text = (
                "only this engine's own processes can register a rank; where SGLang's launcher does not start its schedulers, "
                f"give all of them the same {KEY}"
            )
            return web.Response(status=403, text=text)
        try:
            rank = PrefillRank(**_object(content))
        except (TypeError, ValueError) as error:
            return web.Response(status=400, text=f"not a rank of a prefill engine with kvferry: {error}")
        if any((one.dp_size, one.tp_size) != (rank.dp_size, rank.tp_size) for one in self._ranks.values()):
            self._ranks.clear()  # another life of the engine, sharded in another way
        self._ranks[rank.dp_rank, rank.tp_rank] = rank
        return web.Response(text="OK")

    def _is_of_engine(self, request: web.Request, content: bytes) -> bool:
        given = request.headers.get(SIGNATURE, "")
        return hmac.compare_digest(given.encode(), signature(self._key, request.path, content).encode())

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
        content = await request.read()
        try:
            body = _object(content)
            room, dp_rank = int(body["bootstrap_room"]), int(body["dp_rank"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            return web.Response(status=400, text=f"bootstrap_room and dp_rank are needed: {error!r}")
        first = self._ranks.get((0, 0))
        dp_size = MAX_RANKS if first is None else first.dp_size
        for name, value, most in (("bootstrap_room", room, _MAX_ROOM), ("dp_rank", dp_rank, dp_size - 1)):
            if not 0 <= value <= most:
                return web.Response(status=400, text=f"{name} is {value}; it must be in [0, {most}]")
        now = self._clock()
        told = self._rooms.get(room)
        is_other = told is not None and told.dp_rank != dp_rank and now < told.until
        if is_other and not self._is_of_engine(request, content):
            return web.Response(status=409, text=f"bootstrap_room {room} is taken")
        is_full = len(self._rooms) >= MAX_ROOMS and next(iter(self._rooms.values())).until > now
        if told is None and is_full and not self._is_of_engine(request, content):
            return web.Response(status=503, text=f"{MAX_ROOMS} rooms are kept, the most that strangers can add")
        self._rooms[room] = _Room(dp_rank, now + DP_RANK_KEPT_S)
        self._rooms.move_to_end(room)
        for _ in range(2):  # each call adds one at most, so the table shrinks when its entries expire
            oldest = next(iter(self._rooms.values()))
            if len(self._rooms) > MAX_ROOMS or oldest.until <= now:
                self._rooms.popitem(last=False)
        return web.Response(text="OK")

    async def _query_dp_ranks(self, request: web.Request) -> web.Response:
        try:
            rooms = [int(room) for room in _object(await request.read())["bootstrap_rooms"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            return web.Response(status=400, text=f"bootstrap_rooms is needed: {error!r}")
        now = self._clock()
        found = {str(room): self._rooms[room] for room in rooms if room in self._rooms}
        return web.json_response({name: room.dp_rank for name, room in found.items() if now < room.until})


@dataclass(frozen=True, slots=True)
class _Room:
    """The replica that has a request, and the end of the entry's life."""

    dp_rank: int
    until: float


def _object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in `content`.

    Raises:
        ValueError: `content` is not a JSON object.
    """
    try:
        body = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(body, dict):
        raise ValueError(f"it is a JSON {type(body).__name__}")
    return body


def register_rank(url: str, rank: PrefillRank) -> threading.Thread:
    """Register a rank at the bootstrap server at `url` (``http://host:port``), which starts beside the ranks.

    Returns:
        The thread that registers. After a minute it logs an error and gives up, and the engine gets no requests.
    """

    def register() -> None:
        for _ in range(REGISTER_TRIES):
            try:
                _call("PUT", url, "/route", asdict(rank))
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
    """Register the replica of a request at the engine's own bootstrap server. Raises the errors of `_call`."""
    _call("POST", url, "/register_dp_rank", {"bootstrap_room": room, "dp_rank": dp_rank})


def fetch_info(url: str) -> PrefillInfo:
    """Query the bootstrap server at `url` for its prefill engine.

    Raises:
        PeerUnreachable: It does not answer, or not all ranks have registered.
        RemoteProtocolError: It belongs to another backend, or its answer is invalid.
    """
    query = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    answer = _call("GET", url, f"/route?{query}")
    if not isinstance(answer, Mapping) or "kvferry_addresses" not in answer:
        raise RemoteProtocolError(f"{url} is the bootstrap server of another transfer backend; prefill needs kvferry, too")
    try:
        info = PrefillInfo(
            dp_size=int(answer["dp_size"]),
            follow_bootstrap_room=bool(answer["follow_bootstrap_room"]),
            page_size=int(answer["page_size"]),
            attn_tp_size=int(answer["attn_tp_size"]),
            addresses=tuple(map(str, answer["kvferry_addresses"])),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RemoteProtocolError(f"{url} describes its prefill engine wrongly: {error!r}") from error
    if len(info.addresses) != info.dp_size or not all(info.addresses):
        raise RemoteProtocolError(
            f"{url} names {len(info.addresses)} addresses of kvferry; the engine has {info.dp_size} replicas"
        )
    return info


class PrefillLookups:
    """Cache of prefill engines, by the address of their bootstrap servers. Owned by a scheduler's thread.

    A request names the address, which may never answer, or answer a byte at a time. So other threads query engines, and an engine
    is not known before it has answered.
    """

    def __init__(self, *, fetch: Callable[[str], PrefillInfo] = fetch_info, clock: Callable[[], float] = time.monotonic) -> None:
        self.known: dict[str, PrefillInfo] = {}
        self._fetch = fetch
        self._clock = clock
        self._threads = ThreadPoolExecutor(max_workers=MAX_LOOKUPS, thread_name_prefix="kvferry-lookup")
        self._asked: dict[str, Future[PrefillInfo]] = {}
        self._failed: OrderedDict[str, float] = OrderedDict()  # time of the next allowed query, the oldest first
        self._next_wait_s = 0.0

    def is_known(self, address: str) -> bool:
        """Return whether the engine at `address` (host:port) is in `known`. If not, start a query."""
        self._take_answers()
        if address in self.known:
            return True
        now = self._clock()
        if address in self._asked or len(self._asked) >= MAX_LOOKUPS or now < self._failed.get(address, now):
            return False
        asked = self._asked[address] = self._threads.submit(self._fetch, f"http://{address}")
        if now >= self._next_wait_s:
            wait([asked], timeout=LOOKUP_WAIT_S)
            waited_s = self._clock() - now
            self._next_wait_s = now + waited_s / LOOKUP_WAIT_SHARE
            self._take_answers()
        return address in self.known

    def forget(self, address: str) -> None:
        """Forget the engine at `address`, because it may have been started again."""
        self.known.pop(address, None)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _take_answers(self) -> None:
        for address, asked in list(self._asked.items()):
            if not asked.done():
                continue
            del self._asked[address]
            self._failed.pop(address, None)
            try:
                self.known[address] = asked.result()
            except TransferError as error:
                log.warning("prefill_lookup_failed", bootstrap=address, reason=str(error))
                self._failed[address] = self._clock() + RETRY_LOOKUP_S
        for kept in (self.known, self._failed):
            while len(kept) > MAX_ENGINES:
                del kept[next(iter(kept))]


def _call(method: str, url: str, path: str, body: object = None) -> Any:
    """Call the server at `url` (``http://host:port``), and return its answer, parsed if it is JSON. A body is signed.

    Raises:
        PeerUnreachable: No answer, or 503.
        RemoteProtocolError: A refusal, or an answer that is no JSON although it claims to be.
    """
    content, headers = b"", {"Accept-Encoding": "identity"}
    if body is not None:
        content = json.dumps(body).encode()
        headers |= {"Content-Type": "application/json", SIGNATURE: signature(engine_key(), path, content)}
    return asyncio.run(_ask(method, url + path, content, headers))


async def _ask(method: str, url: str, content: bytes, headers: Mapping[str, str]) -> Any:
    """Send a call and return the answer. The limit of the whole call bounds an answer that arrives a byte at a time."""
    received = bytearray()
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S), auto_decompress=False) as session,
            session.request(method, url, data=content, headers=headers, allow_redirects=False) as answer,
        ):
            async for part in answer.content.iter_any():
                received += part
                if len(received) > MAX_ANSWER_BYTES:
                    raise RemoteProtocolError(f"{url} answers with more than {MAX_ANSWER_BYTES} bytes")
    except TimeoutError:
        raise PeerUnreachable(f"{url} does not answer within {CALL_TIMEOUT_S:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise PeerUnreachable(f"{url} does not answer: {error}") from None
    text = received.decode("utf-8", "replace")
    if answer.status != 200:
        kind = PeerUnreachable if answer.status == 503 else RemoteProtocolError
        raise kind(f"{url} answers {answer.status}: {text[:1000]}")
    if "json" not in answer.content_type:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"{url} returned invalid JSON: {error}") from None
