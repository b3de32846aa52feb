"""A network of TCP relays on another loopback address, which can go silent, slow, or reset its connections.

Nodes that listen on 127.0.0.1 and advertise `PROXY_HOST` reach each other only through it: for each port on which one of their
processes listens, there is a relay at the same port of that address. So registry and control plane can be cut without
privileges. The data plane's ports are exchanged by UCX, and are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Final

HOST: Final = "127.0.0.1"
PROXY_HOST: Final = "127.0.0.2"
_LOOK_S: Final = 0.05
_BYTES: Final = 65_536


def listening_ports(pids: Iterable[int]) -> set[int]:
    """Return the TCP ports on which these processes listen, at any address."""
    inodes: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    inodes[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    port = inodes.get(os.readlink(f"/proc/{pid}/fd/{number}").removeprefix("socket:[").removesuffix("]"))
                    if port is not None:
                        found.add(port)
    return found


class ProxyNetwork:
    """Relays to the listening ports of processes, in a thread of its own. Use as a context manager.

    Args:
        pids: Returns the present processes. Called repeatedly, because ranks can start again.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._servers: dict[int, asyncio.Server] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.delay_s = 0.0
        """Delay in each direction, in seconds."""

    def __enter__(self) -> ProxyNetwork:
        self._thread.start()
        self._call(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def silence(self) -> None:
        """Let nothing through, without any error; new connections get no answer."""
        self._call(self._flows.clear)

    def heal(self) -> None:
        """Deliver all data that was held back, as retransmissions do."""
        self.delay_s = 0.0
        self._call(self._flows.set)

    def reset(self) -> None:
        """Reset every connection, like a firewall that has lost its state."""
        self._call(self._reset)

    def _call(self, work: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                work()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(30)

    def _start(self) -> None:
        self._following = self._loop.create_task(self._follow())

    async def _stop(self) -> None:
        for server in self._servers.values():
            server.close()
        self._reset()
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _reset(self) -> None:
        for writer in list(self._writers):
            opened: socket.socket | None = writer.get_extra_info("socket")
            if opened is not None:
                with contextlib.suppress(OSError):
                    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._writers.clear()

    async def _follow(self) -> None:
        while True:
            ports = await asyncio.to_thread(lambda: listening_ports(self._pids()))
            for port in ports - self._servers.keys():
                with contextlib.suppress(OSError):  # somebody else's, on every address: no port of the nodes
                    self._servers[port] = await asyncio.start_server(
                        lambda reader, writer, port=port: self._relay(reader, writer, port), PROXY_HOST, port
                    )
            for port in self._servers.keys() - ports:
                self._servers.pop(port).close()
            await asyncio.sleep(_LOOK_S)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        self._writers.add(writer)
        try:
            await self._flows.wait()
            far_reader, far_writer = await asyncio.open_connection(HOST, port)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(far_writer)
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer), return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        finally:
            self._writers.discard(writer)
            writer.close()
