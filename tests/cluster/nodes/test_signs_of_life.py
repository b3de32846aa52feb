"""Ranks that hang, and signals that reach the whole process group."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from node_runtime import supervisor as supervisor_module
from node_runtime.rank_group import fork_server_pid
from node_runtime.supervisor import RankSupervisor
from tests.runtime import rank_entries
from tests.runtime.instances import prefill_config, until
from tests.runtime.rank_entries import Echo, Order


class Ranks:
    def __init__(self, folder: Path) -> None:
        self.heard: list[object] = []
        self.lost: list[str] = []
        self.supervisor = RankSupervisor(
            prefill_config(folder, parallel={"tp_size": 2}),
            rank_entries.obedient,
            rank_entries.CODEC,
            preload=["tests.runtime.preloaded"],
            on_message=lambda rank, message: self.heard.append(message),
            on_lost=self.lost.append,
        )

    async def close(self) -> None:
        await self.supervisor.stop(is_graceful=False)
        self.supervisor.cleanup()


async def test_a_rank_that_hangs_loses_the_life_and_an_idle_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "RANK_SILENCE_S", 2.5)
    monkeypatch.setattr(supervisor_module, "SILENCE_TICK_S", 0.1)
    ranks = Ranks(tmp_path)
    try:
        await ranks.supervisor.start()
        await asyncio.sleep(3.5)
        assert not ranks.lost, "nothing of the ranks has changed, and they have said so"
        time.sleep(3.0)
        await asyncio.sleep(0.3)
        assert not ranks.lost, "it was the leader that stood still"
        ranks.supervisor.send(1, Order(what="block"))
        await until(lambda: ranks.lost, within_s=10.0)
        assert ranks.lost == ["rank 1 has not reported for 2.5 s"]
    finally:
        await ranks.close()


async def test_sigterm_to_every_process_of_the_node_is_the_leaders_to_answer(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    try:
        await ranks.supervisor.start()
        fork_server = fork_server_pid()
        assert fork_server is not None
        for pid in (*ranks.supervisor.pids, fork_server):
            os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(0.3)
        ranks.supervisor.broadcast(Order(what="echo"))
        await until(lambda: len(ranks.heard) == 2 or ranks.lost)
        assert not ranks.lost and all(isinstance(message, Echo) for message in ranks.heard)
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the leader itself still hears it"
        started_s = time.monotonic()
        await ranks.supervisor.stop(is_graceful=True)
        assert time.monotonic() - started_s < 5, "they end when their leader says so"
    finally:
        await ranks.close()
