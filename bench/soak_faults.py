"""The faults of the soak: ranks and leaders of a local cluster are killed or frozen, one after the other."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.local_cluster.cluster import LocalCluster, NodeFailed
from kvferry.local_cluster.spec import Role

FROZEN_S = 3.0
"""Longer than three heartbeats of half a second: the other tier has given the process up when it wakes."""
RESTART_S = 90.0
NOTICE_S = 5.0
_POLL_S = 0.05


class Kind(StrEnum):
    """What is done to a process."""

    KILL_RANK = "rank killed"
    FREEZE_RANK = "rank frozen"
    KILL_LEADER = "leader killed"
    FREEZE_LEADER = "leader frozen"


_SHARES = {Kind.KILL_RANK: 5, Kind.FREEZE_RANK: 3, Kind.KILL_LEADER: 1, Kind.FREEZE_LEADER: 1}


@dataclass(slots=True, kw_only=True)
class Fault:
    """One of them.

    Attributes:
        what: Kind and place.
        began_s: Monotonic time.
        ended_s: When both tiers were joined again; infinite until then.
    """

    what: str
    began_s: float
    ended_s: float = field(default=float("inf"))

    @property
    def healed_s(self) -> float:
        return self.ended_s - self.began_s


class Faults:
    """Injects faults, each into a cluster that has recovered from the one before.

    Args:
        cluster: Started.
        seed: Of every choice that is made here.
    """

    def __init__(self, cluster: LocalCluster, *, seed: int) -> None:
        self.all: list[Fault] = []
        self._cluster = cluster
        self._chance = random.Random(seed)

    def explains(self, began_s: float) -> bool:
        """Whether a fault was going on at some time between `began_s` and now."""
        return any(fault.ended_s >= began_s for fault in self.all)

    async def inject(self) -> Fault:
        """Choose one, and wait until the cluster serves again.

        Raises:
            NodeFailed: It does not.
        """
        kind = self._chance.choices(list(_SHARES), weights=list(_SHARES.values()))[0]
        role: Role = self._chance.choice(("prefill", "decode"))
        node = self._cluster.prefill if role == "prefill" else self._cluster.decode
        is_rank = kind in (Kind.KILL_RANK, Kind.FREEZE_RANK)
        rank = self._chance.randrange(len(node.rank_pids))
        victim, incarnation = node.rank_pids[rank] if is_rank else node.pid, node.incarnation
        fault = Fault(what=f"{role} {kind}", began_s=time.monotonic())
        self.all.append(fault)
        match kind:
            case Kind.KILL_RANK:
                os.kill(victim, signal.SIGKILL)
                await self._until(lambda: node.lives_anew(incarnation), fault)
            case Kind.KILL_LEADER:
                os.kill(victim, signal.SIGKILL)
                node.reap(NOTICE_S)
                self._cluster.launch(role)
            case Kind.FREEZE_RANK | Kind.FREEZE_LEADER:
                os.kill(victim, signal.SIGSTOP)
                try:
                    await asyncio.sleep(FROZEN_S)
                finally:
                    os.kill(victim, signal.SIGCONT)
        await self._cluster.wait_joined(RESTART_S)
        fault.ended_s = time.monotonic()
        return fault

    async def _until(self, is_true: Callable[[], bool], fault: Fault) -> None:
        while not is_true():
            if time.monotonic() - fault.began_s > RESTART_S:
                raise NodeFailed("decode", f"no new life {RESTART_S:g} s after: {fault.what}", exit_code=None, log_tail=[])
            await asyncio.sleep(_POLL_S)
