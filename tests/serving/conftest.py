"""One cluster for all tests of this folder, with TLS, tracing, offload and the status page."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from tests.authority import Authority, Files
from tests.cluster.calls import Caller, prompt, until_idle
from tests.cluster.conftest import HEARTBEAT_S, START_TIMEOUT_S, model, reference, running
from tests.tracing.collector import Collector, listening
from transfer.registry.security import MutualTls

__all__ = ["model", "reference"]

NAMES = {"prefill": "prefill.example", "decode": "decode.example", "client": "spiffe://cluster.example/operator"}
CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A prefill node of two ranks and a decode node of one rank, with a trace collector, certificates and a store.

    Args:
        cluster: Both nodes. Tests leave them idle and joined, and end none of their processes.
        collector: Receives the spans of the nodes, and of a client that exports to `collector_port`.
        collecting: Context of the collector; `close()` stops the collector.
        authority: Certificate authority of all certificates.
        files: Certificate files by side: "prefill", "decode" and "client".
        store: Directory of the KV store.
    """

    cluster: LocalCluster
    collector: Collector
    collector_port: int
    collecting: contextlib.ExitStack
    authority: Authority
    files: dict[str, Files]
    store: Path

    def security(self, side: str = "client", files: Files | None = None) -> MutualTls:
        """Return credentials for calls to the nodes, with the certificate of a side, or with `files`."""
        return (files or self.files[side]).security(NAMES["prefill"], NAMES["decode"])

    def caller(self) -> Caller:
        """Return a client of the decode node."""
        return Caller(self.cluster.decode.address, self.security())

    def client(self, role: str = "decode", side: str = "client", files: Files | None = None) -> NodeClient:
        """Return an operator's connection to a node."""
        node = self.cluster.decode if role == "decode" else self.cluster.prefill
        return NodeClient(node.address, security=self.security(side, files))

    def tls_options(self) -> list[str]:
        """Return the TLS options of a command that calls the nodes."""
        files = self.files["client"]
        options = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]
        return [*options, "--peer-name", NAMES["decode"], "--peer-name", NAMES["prefill"]]

    async def until_idle(self) -> None:
        await until_idle(*self.cluster.nodes)

    def load(self) -> AbstractContextManager[None]:
        """Send requests to the decode node while the block runs."""
        return under_load(self.cluster.decode.address, self.security())


_variants = itertools.count(1000)  # a stored prompt would not be transferred


@contextmanager
def under_load(address: str, security: MutualTls | None = None) -> Iterator[None]:
    """Send requests from another thread: two callers generate 400 tokens each time, two others transfer new prompts."""
    loop = asyncio.new_event_loop()

    async def transfer(caller: Caller) -> None:
        while True:
            await caller.ask(prompt(300, next(_variants)), 2)

    async def generate(caller: Caller, number: int) -> None:
        while True:
            await caller.begin(prompt(40, number), 400, request_id=f"customer-{number}-story")[1]

    async def send() -> None:
        async with Caller(address, security) as caller:
            await asyncio.gather(transfer(caller), transfer(caller), *(generate(caller, n) for n in range(2)))

    task = loop.create_task(send())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="session")
def serving(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with open_serving(model, tmp_path_factory.mktemp("serving")) as opened:
        yield opened


@contextmanager
def open_serving(model: Path, folder: Path) -> Iterator[Serving]:
    """Start the cluster, with its files in `folder`; end it after the block."""
    authority, store = Authority(), folder / "store"
    store.mkdir()
    files = {side: authority.files(folder / side, name, "localhost", days=30) for side, name in NAMES.items()}
    collector = Collector()
    with _held_port() as port, contextlib.ExitStack() as collecting:
        collecting.enter_context(listening(collector, port))
        both = {
            "tracing.endpoint": f"http://127.0.0.1:{port}",
            "tracing.sample_ratio": 0,
            "status_page.request_ids": True,
            "storage.directory": store,
        }
        offload = {"offload.host_ratio": 8, "offload.device_window": 64, "offload.stride_tokens": 16}
        spec = ClusterSpec(
            prefill=TierSpec(
                model=model,
                tp_size=2,
                page_size=16,
                pool_tokens=8192,
                settings=both | files["prefill"].settings(peers=NAMES["decode"], clients=NAMES["client"]),
            ),
            decode=TierSpec(
                model=model,
                page_size=32,
                pool_tokens=512,
                settings=both | offload | files["decode"].settings(peers=NAMES["prefill"], clients=NAMES["client"]),
            ),
            security=files["client"].security(NAMES["prefill"], NAMES["decode"]),
            chunk_tokens=CHUNK_TOKENS,
            heartbeat_s=HEARTBEAT_S,
            start_timeout_s=START_TIMEOUT_S,
            log_level="debug",
        )
        with running(spec) as cluster:
            yield Serving(
                cluster=cluster,
                collector=collector,
                collector_port=port,
                collecting=collecting,
                authority=authority,
                files=files,
                store=store,
            )


@contextmanager
def _held_port() -> Iterator[int]:
    """Reserve a port for servers of this process."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
