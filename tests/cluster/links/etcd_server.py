"""A real etcd server of one test: one member, on loopback, ended by its id."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 30.0


def program() -> str:
    """The path of `etcd`; the test is skipped where there is none."""
    found = shutil.which("etcd")
    if found is None:
        pytest.skip("no etcd on the PATH; Debian and Ubuntu have it in the package etcd-server")
    return found


class EtcdServer:
    """One member that can be killed, frozen and started again at the same address.

    Args:
        folder: Where it keeps its data and its log.
        scheme: "http", or "https" with flags that say which certificates.
        flags: On top of what every one of these has.
    """

    def __init__(self, folder: Path, *, scheme: str = "http", flags: Sequence[str] = ()) -> None:
        self.folder = folder
        self.data = folder / "data"
        self._held = []
        for _ in range(2):  # bound, and not listening: nobody else gets the port while this lives, and etcd can listen there
            held = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            self._held.append(held)
        client, peer = (held.getsockname()[1] for held in self._held)
        self.port = client
        self.endpoint = f"{scheme}://127.0.0.1:{client}"
        peer_url = f"http://127.0.0.1:{peer}"
        self._command = [
            program(),
            *("--name", "one", "--data-dir", str(self.data), "--unsafe-no-fsync", "--logger", "zap"),
            *("--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"one={peer_url}"),
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
            *flags,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    async def start(self) -> None:
        """Launch it, and wait until it listens."""
        self.launch()
        async with asyncio.timeout(START_S):
            while True:
                assert self._process is not None and self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    return

    def kill(self, *, forgets: bool = False) -> None:
        """End it at once; `forgets`: what it has stored is gone, too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
        if forgets:
            shutil.rmtree(self.data, ignore_errors=True)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def close(self) -> None:
        self.kill()
        for held in self._held:
            held.close()


@contextmanager
def etcd_server(folder: Path, *, scheme: str = "http", flags: Sequence[str] = ()) -> Iterator[EtcdServer]:
    """A server that is not started yet, and is ended afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    server = EtcdServer(folder, scheme=scheme, flags=flags)
    try:
        yield server
    finally:
        server.close()
