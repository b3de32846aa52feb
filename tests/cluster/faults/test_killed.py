"""Processes that die in mid-transfer: whom it hits hears in time, who needs them no more goes on, and the tiers serve again."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from kvferry.local_cluster.spec import Role
from tests.cluster.calls import Reference, status_of, until
from tests.cluster.faults.conftest import Chaos
from tests.cluster.faults.scenario import UNAVAILABLE, Scenario

pytestmark = pytest.mark.timeout(180)

RESTART_S = 60.0  # a second or two on two quiet cores


def alive(pids: tuple[int, ...]) -> list[int]:
    """Processes of these that have not ended; one that waits to be collected has."""
    living = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            living.append(pid)
    return living


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_rank_dies(tiers: Chaos, reference: Reference, role: Role) -> None:
    rank = 1
    node, survivor = (tiers.prefill, tiers.decode) if role == "prefill" else (tiers.decode, tiers.prefill)
    pids, incarnation, survivors = node.rank_pids, node.incarnation, survivor.rank_pids
    async with Scenario(tiers, reference) as scene:
        talking = await scene.generating()
        moving = await scene.arriving(2)
        with scene.fault():
            os.kill(pids[rank], signal.SIGKILL)
        scene.ends(moving, UNAVAILABLE)
        answers = await scene.over(moving)
        assert not any(answer.tokens for answer in answers)
        if role == "decode":  # what generated there is lost with it
            scene.ends([talking], UNAVAILABLE)
            # The leader reports its child, or the prefill node its broken session (before or after its request began there).
            said = re.compile(rf"rank {rank} died: killed by signal 9|decode rank {rank} is lost|with the decode rank is lost")
            assert all(said.search(answer.details) for answer in answers), [answer.details for answer in answers]
        await until(lambda: not alive(pids), "the whole rank group ended")
        await until(
            lambda: node.lives_anew(incarnation),
            "another life of the ranks",
            within_s=RESTART_S,
        )
        await tiers.cluster.wait_joined(RESTART_S)
        assert survivor.rank_pids == survivors, "the other tier's ranks were to live on"
        status = await status_of(node)
        assert status is not None and status.restarts >= 1
        await scene.serves()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leader_dies(tiers: Chaos, reference: Reference, role: Role) -> None:
    """And the node is started again, at the same address, as another life."""
    node = tiers.prefill if role == "prefill" else tiers.decode
    pids, address, incarnation = node.rank_pids, node.address, node.incarnation
    killed = {node.pid, *pids, *(child.pid for child in psutil.Process(node.pid).children(recursive=True))}
    async with Scenario(tiers, reference) as scene:
        talking = await scene.generating()
        moving = await scene.arriving(2)
        with scene.fault():
            os.kill(node.pid, signal.SIGKILL)
        scene.ends(moving, UNAVAILABLE)
        if role == "decode":
            scene.ends([talking], UNAVAILABLE)
        await scene.over(moving)
        node.reap(5)
        await until(lambda: not alive(pids), "the ranks of a killed leader ended")
        await until(lambda: killed.isdisjoint(tiers.cluster.processes()), "nothing of the killed node is left", within_s=10)
        await scene.over([talking])
        tiers.relaunch(role)
        await tiers.cluster.wait_joined()
        again = tiers.prefill if role == "prefill" else tiers.decode
        assert again.address == address and again.incarnation != incarnation
        await scene.serves()
