"""From a host to a connection: the lookup of its name, which can hang, and whichever of its addresses answers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import threading
from typing import Any

from transfer.plain_text import host_of


async def addresses_of(host: str) -> tuple[str, ...]:
    """Every address of a name, IPv4 and IPv6, in the order in which the system would try them; an address is its own.

    A resolver can hang for as long as its own limits let it; nobody waits for that at the end of the process, nor does it hold
    up other lookups, as the few threads of an executor would.

    Raises:
        OSError: There is none, and why.
    """
    if is_literal(host):
        return (host,)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[str, ...]] = loop.create_future()

    def settle(found: tuple[str, ...] | OSError) -> None:
        if answer.done():
            return
        if isinstance(found, OSError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def ask() -> None:
        found: tuple[str, ...] | OSError
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = tuple(dict.fromkeys(str(address[0]) for *_, address in infos))
        except OSError as error:
            found = error
        except ValueError as error:  # a label that is too long, or empty; a zero byte
            found = OSError(0, f"its host is no name: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=ask, name="resolve", daemon=True).start()
    return await answer


async def connected(address: str) -> socket.socket:
    """A TCP connection to host:port, for the caller to close: to the first address of the host that takes one.

    Raises:
        OSError: It is no host:port, the host has no address, or none of them takes it.
    """
    port = address.rpartition(":")[2]
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65_535):
        raise OSError(0, "it must be host:port with a port from 1 to 65535")
    loop = asyncio.get_running_loop()
    refused = OSError(0, "its host has no address")
    for found in await addresses_of(host_of(address)):
        family, kind, protocol, _, target = socket.getaddrinfo(
            found, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )[0]
        try:
            made = socket.socket(family, kind, protocol)
        except OSError as error:  # a machine without IPv6
            refused = error
            continue
        try:
            made.setblocking(False)
            await loop.sock_connect(made, target)
        except OSError as error:
            made.close()
            refused = error
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise refused


def is_literal(host: str) -> bool:
    """Whether a host, without brackets, is an address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def address_of(peer: tuple[Any, ...]) -> str:
    """host:port of a socket's address, as `getpeername()` gives it."""
    return f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"


def text_of(error: OSError) -> str:
    """Why a lookup or a connection failed, in the system's words, without what was called."""
    if error.errno is not None and error.errno > 0:  # a resolver's are negative, and have texts of their own
        return os.strerror(error.errno)
    return error.strerror or str(error)
