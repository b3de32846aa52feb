"""Connect to a host: look its name up, which can hang, and connect to the first of its addresses that answers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import threading
from collections import deque
from collections.abc import Collection, Sequence
from itertools import chain, zip_longest
from typing import Any, Final

from transfer.plain_text import host_of

MAX_LOOKUPS: Final = 64
"""Threads that look names up. A thread that hangs delays no other name until all threads hang."""

MAX_ADDRESSES: Final = 16
"""Addresses of a name that are tried for one connection: the owner of a name can give it thousands."""

STAGGER_S: Final = 0.25
"""Time until the next address is tried beside one that does not answer. Source: RFC 8305, section 5."""


class Lookups:
    """Ask the system for the addresses of names: one lookup of a name at a time, shared by all callers. Any loop may call it.

    A resolver can hang for as long as its own limits allow. The threads are daemons, because the end of the process would wait
    for those of an executor.

    Args:
        max_threads: Lookups at once; further names wait in line. No thread is kept while nothing is looked up.
    """

    def __init__(self, max_threads: int = MAX_LOOKUPS) -> None:
        self._max_threads = max_threads
        self._lock = threading.Lock()
        self._num_threads = 0
        self._line: deque[str] = deque()  # names that no thread has taken yet
        self._waiting: dict[str, list[asyncio.Future[tuple[str, ...]]]] = {}  # names in line and under way; also without any

    async def ask(self, host: str) -> tuple[str, ...]:
        """Return every address of a name.

        Raises:
            OSError: The name has no address, or no thread can be started to look it up; with the reason.
        """
        answer: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        with self._lock:
            if host in self._waiting:
                self._waiting[host].append(answer)
            else:
                self._begin(host, answer)
        try:
            return await answer
        finally:
            self._forget(host, answer)

    def _begin(self, host: str, answer: asyncio.Future[tuple[str, ...]]) -> None:
        if self._num_threads < self._max_threads:
            try:
                threading.Thread(target=self._work, name="resolve", daemon=True).start()
            except RuntimeError as error:  # the system's limit, or that of the container
                if self._num_threads == 0:  # otherwise one of them will come to it
                    raise OSError(0, f"its name cannot be looked up: {error}") from None
            else:
                self._num_threads += 1
        self._waiting[host] = [answer]
        self._line.append(host)

    def _forget(self, host: str, answer: asyncio.Future[tuple[str, ...]]) -> None:
        """Drop a caller that waits no more. A lookup under way goes on, for the next caller; one in line without callers goes."""
        with self._lock:
            waiting = self._waiting.get(host, [])
            if answer in waiting:
                waiting.remove(answer)
                if not waiting and host in self._line:
                    self._line.remove(host)
                    del self._waiting[host]

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._line:
                    self._num_threads -= 1
                    return
                host = self._line.popleft()
            found = _looked_up(host)
            with self._lock:
                waiting = self._waiting.pop(host)
            for answer in waiting:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    answer.get_loop().call_soon_threadsafe(_settle, answer, found)


def _looked_up(host: str) -> tuple[str, ...] | Exception:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(address[0]) for *_, address in infos))
    except ValueError as error:  # a label that is too long, or empty; a zero byte
        return OSError(0, f"its host is not a valid name: {error}")
    except Exception as error:  # for the callers that wait; the thread goes on with other names
        return error


def _settle(answer: asyncio.Future[tuple[str, ...]], found: tuple[str, ...] | Exception) -> None:
    if answer.done():
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)


_lookups = Lookups()


async def addresses_of(host: str) -> tuple[str, ...]:
    """Return every address of a name, IPv4 and IPv6, in the order in which the system would try them; of an address, itself.

    Raises:
        OSError: The name has no address, or cannot be looked up; with the reason.
    """
    return (host,) if is_literal(host) else await _lookups.ask(host)


async def connected(address: str, *, last: Sequence[str] = ()) -> socket.socket:
    """Return a TCP connection to the first address of a host that accepts one; the caller closes it.

    The next address is tried `STAGGER_S` after one that does not answer, or at once after one that fails. Families take turns,
    because a machine can lack a route for one of them. Source: RFC 8305.

    Args:
        address: host:port.
        last: Addresses that are tried after all others, in this order.

    Raises:
        OSError: It is no host:port, the host has no address, or none of the first `MAX_ADDRESSES` accepts a connection.
    """
    port = address.rpartition(":")[2]
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65_535):
        raise OSError(0, "it must be host:port with a port from 1 to 65535")
    order = _in_order(await addresses_of(host_of(address)), last)
    return await _first_connected(order[:MAX_ADDRESSES], int(port))


def _in_order(addresses: Collection[str], last: Sequence[str]) -> list[str]:
    is_first_v6 = ":" in next(iter(addresses), "")
    same = [address for address in addresses if (":" in address) == is_first_v6]
    other = [address for address in addresses if (":" in address) != is_first_v6]
    in_turns = [address for address in chain.from_iterable(zip_longest(same, other)) if address is not None]
    return sorted(in_turns, key=lambda address: last.index(address) if address in last else -1)


async def _first_connected(addresses: Collection[str], port: int) -> socket.socket:
    left = deque(addresses)
    attempts: set[asyncio.Task[socket.socket]] = set()
    refused = OSError(0, "its host has no address")
    try:
        while left or attempts:
            if left:
                attempts.add(asyncio.ensure_future(_attempt(left.popleft(), port)))
            done, _ = await asyncio.wait(attempts, timeout=STAGGER_S if left else None, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                try:
                    made = attempt.result()
                except OSError as error:
                    refused = error
                    attempts.discard(attempt)
                else:
                    attempts.discard(attempt)
                    return made
        raise refused
    finally:
        for attempt in attempts:
            attempt.add_done_callback(_close_unused)
            attempt.cancel()


async def _attempt(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, target = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )[0]
    made = socket.socket(family, kind, protocol)  # an error on a machine without IPv6
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, target)
    except BaseException:
        made.close()
        raise
    return made


def _close_unused(attempt: asyncio.Task[socket.socket]) -> None:
    """Close the connection of an attempt that was slower than another."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()


def is_literal(host: str) -> bool:
    """Return whether a host, without brackets, is an address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def address_of(peer: tuple[Any, ...]) -> str:
    """Return host:port of a socket's address, as `getpeername()` returns it."""
    return f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"


def text_of(error: OSError) -> str:
    """Return why a lookup or a connection failed, in the system's words, without the name of the call."""
    if error.errno is not None and error.errno > 0:  # a resolver's are negative, and have texts of their own
        return os.strerror(error.errno)
    return error.strerror or str(error)
