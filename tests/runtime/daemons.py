"""A supervisor, or a node's daemon, in this process, with real rank processes and roles that do nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from node_runtime.daemon import Daemon, NodeState
from node_runtime.health import Readiness
from node_runtime.rank_worker import RankSpec
from node_runtime.supervisor import RankSide, RankSupervisor
from tests.runtime import rank_entries
from tests.runtime.instances import decode_config, prefill_config, until
from transfer.config import NodeConfig
from transfer.connector.rank_report import RankReady
from transfer.errors import TransferError
from transfer.metrics import MetricFamily

ENDED_WITHIN_S = 60.0
PRELOAD = ["tests.runtime.preloaded"]


class Ranks:
    """A supervisor of two ranks that records its calls."""

    def __init__(self, folder: Path, entry: Callable[[RankSpec], None], preload: Sequence[str]) -> None:
        self.heard: list[tuple[int, Any]] = []
        self.lost: list[str] = []
        self.on_message: Callable[[int, Any], None] = lambda rank, message: self.heard.append((rank, message))
        side = RankSide(
            config=prefill_config(folder, parallel={"tp_size": 2}),
            codec=rank_entries.CODEC,
            on_message=lambda rank, message: self.on_message(rank, message),
        )
        self.supervisor = RankSupervisor(side, entry, preload=preload, on_lost=self.lost.append)
        self.folder = self.supervisor.folder


@asynccontextmanager
async def ranks_of(folder: Path, entry: Callable[[RankSpec], None], *, preload: Sequence[str] = PRELOAD) -> AsyncIterator[Ranks]:
    ranks = Ranks(folder, entry, preload)
    try:
        yield ranks
    finally:
        pids = ranks.supervisor.pids
        await ranks.supervisor.stop(is_graceful=False)
        ranks.supervisor.cleanup()
        assert not any(rank_entries.is_alive(pid) for pid in pids if pid)
        assert not ranks.folder.exists()


class QuietRole:
    """A `node_runtime.daemon.RoleServer` that records the calls of its methods."""

    status_page = None

    def __init__(self, config: NodeConfig, entry: Callable[[RankSpec], None], other: NodeConfig | None = None) -> None:
        self.history: list[str] = []
        self.errors: list[TransferError] = []
        self.incarnations: list[int] = []
        self.heard: list[Any] = []
        self.in_flight = 0
        self.supervised: RankSupervisor | None = None
        self._entry = entry
        self._other = other
        self._side = RankSide(
            config=config, codec=rank_entries.CODEC, on_message=lambda rank, message: self.heard.append(message)
        )

    @property
    def ranks(self) -> RankSide:
        return self._side

    def take_over(self, before: Any) -> None:
        self.history.append("take over")
        self.supervised = before.supervised

    async def open(self) -> str:
        self.history.append("open")
        return "127.0.0.1:1234"

    def supervisor(self, on_lost: Callable[[str], None]) -> RankSupervisor:
        self.supervised = RankSupervisor(self._side, self._entry, preload=PRELOAD, on_lost=on_lost, other_config=self._other)
        return self.supervised

    async def begin_life(self, hellos: tuple[RankReady, ...]) -> None:
        self.history.append("begin")
        self.incarnations.append(hellos[0].instance.incarnation)

    async def end_life(self, error: TransferError) -> None:
        self.history.append("end")
        self.errors.append(error)
        self.in_flight = 0

    async def drain(self) -> int:
        self.history.append("drain")
        while self.in_flight:
            await asyncio.sleep(0.005)
        return 0

    @property
    def num_in_flight(self) -> int:
        return self.in_flight

    def readiness(self) -> Readiness:
        return Readiness(is_ready=True)

    def collect_metrics(self) -> list[MetricFamily]:
        return []

    async def close(self) -> None:
        self.history.append("close")


class Node:
    """A running daemon with two ranks.

    Args:
        entry: Of a rank process.
        has_two_roles: Whether it can become a decode node.
        settings: Besides those for a quick restart.
    """

    def __init__(
        self,
        folder: Path,
        entry: Callable[[RankSpec], None] = rank_entries.obedient,
        *,
        has_two_roles: bool = False,
        **settings: Any,
    ) -> None:
        self.ready_file = folder / "ready.json"
        quick = {"backoff_s": 0.01, "max_backoff_s": 0.05, "max_restarts": 2}
        shared = {"ready_file": self.ready_file, "parallel": {"tp_size": 2}, "restart": quick, "drain_timeout_s": 5.0}
        first, second = (make(folder, **{**shared, **settings}) for make in (prefill_config, decode_config))
        self.role = QuietRole(first, entry, second if has_two_roles else None)
        self.decode = QuietRole(second, entry, first)
        roles = {"prefill": self.role, "decode": self.decode}
        self.daemon = Daemon(first, lambda _, config: roles[config.role], other_config=second if has_two_roles else None)
        self.life = asyncio.ensure_future(self.daemon.run())

    @property
    def ranks(self) -> RankSupervisor:
        found = self.role.supervised or self.decode.supervised
        assert found is not None
        return found

    def written(self) -> dict[str, Any]:
        """The ready file."""
        content: dict[str, Any] = json.loads(self.ready_file.read_text())
        return content

    async def until_ready(self) -> None:
        await until(lambda: self.daemon.state is NodeState.READY or self.life.done(), ENDED_WITHIN_S)
        assert not self.life.done(), self.life.result()

    async def exit_code(self) -> int:
        async with asyncio.timeout(ENDED_WITHIN_S):
            return await asyncio.shield(self.life)


@asynccontextmanager
async def node_of(folder: Path, entry: Callable[[RankSpec], None] = rank_entries.obedient, **options: Any) -> AsyncIterator[Node]:
    """A node, of which nothing may be left at the end."""
    node = Node(folder, entry, **options)
    try:
        yield node
    finally:
        supervised = node.role.supervised or node.decode.supervised
        pids = supervised.pids if supervised is not None else []
        if not node.life.done():
            node.daemon.request_stop()
            node.role.in_flight = 0
        await asyncio.gather(node.life, return_exceptions=True)
        assert not any(rank_entries.is_alive(pid) for pid in pids)
        assert node.role.history[-1:] == ["close"] and not node.ready_file.exists(), "nothing is left behind"
