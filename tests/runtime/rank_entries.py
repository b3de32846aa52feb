"""Rank processes without an engine: what `RankGroup` and `RankSupervisor` start in these tests. Importable by name."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node_runtime.node_role import NodeRole
from node_runtime.rank_engine import RankEngine
from node_runtime.rank_link import RankCodec, RankLink
from node_runtime.rank_process import RankSpec, run_rank
from node_runtime.rank_report import RankHello, RankLogLevel, RankReport, RankShutdown, RankStartFailed, RankSwitch
from tests.runtime.instances import hello
from transfer.errors import EngineError, LocalProtocolError, MemoryPlanError

SLOW_IMPORT_S = 1.0  # of `slow_preload`


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a rank shall do: "echo", "raise", "hunger" (ask for too much memory), "exit", "freeze", "block" (its loop),
    "contradict" (itself), "hang" (at close)."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    pid: int
    incarnation: int
    num_spared: int


CODEC = RankCodec(Order, Echo, RankHello, RankStartFailed, RankReport, RankLogLevel, RankShutdown, RankSwitch)


def take_too_much() -> None:
    mmap.mmap(-1, 2**60)  # the system refuses it


class ObedientWorker:
    """A `node_runtime.rank_process.Worker` that does what it is told."""

    def __init__(self, spec: RankSpec, link: RankLink, loop: asyncio.AbstractEventLoop, engine: RankEngine) -> None:
        self.spec = spec
        self.link = link
        self.hangs_at_close = False
        self.is_broken = False

    async def start(self) -> RankHello:
        return hello(self.spec.rank, incarnation=self.spec.incarnation, pid=os.getpid())

    def on_message(self, message: Any) -> None:
        match message.what:
            case "echo":
                echo = Echo(pid=os.getpid(), incarnation=self.spec.incarnation, num_spared=gc.get_freeze_count())
                self.link.send(echo)
            case "raise":
                raise RuntimeError("a bug of the rank")
            case "hunger":
                take_too_much()
            case "exit":
                os._exit(9)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "block":
                time.sleep(3600)
            case "contradict":
                self.is_broken = True
            case "hang":
                self.hangs_at_close = True

    def status(self) -> dict[str, int]:
        return {"rank": self.spec.rank, "pid": os.getpid()}

    def check_idle(self) -> bool:
        if self.is_broken:
            raise LocalProtocolError("R5: no live grant, watermark 5, head 6")
        return True

    def metrics(self, status: Mapping[str, Any]) -> Any:
        return None

    async def close(self) -> None:
        if self.hangs_at_close:
            await asyncio.sleep(3600)


class RefusedWorker(ObedientWorker):
    async def start(self) -> RankHello:
        if self.spec.rank == 1:
            raise MemoryPlanError("the pool of 9 GiB does not fit the 8 GiB that are free")
        return await super().start()


class HungryWorker(ObedientWorker):
    """Asks for more memory at the start than there is."""

    async def start(self) -> RankHello:
        if self.spec.rank == 1:
            take_too_much()
        return await super().start()


class LaterHungryWorker(ObedientWorker):
    """Finds no memory in a node's second life; where the model's folder has a file "for ever", not in later lives either."""

    async def start(self) -> RankHello:
        folder = self.spec.config.model
        (folder / f"life-{self.spec.rank}-{self.spec.incarnation}").touch()
        life = len(list(folder.glob(f"life-{self.spec.rank}-*")))
        if self.spec.rank == 1 and (life == 2 or (life > 2 and (folder / "for ever").exists())):
            take_too_much()
        return await super().start()


class DyingWorker(ObedientWorker):
    async def start(self) -> RankHello:
        if self.spec.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().start()


class LaterRefusedWorker(ObedientWorker):
    """Starts in a node's first life, and fails in the second, for ever where there is a file "memory" in the model's folder."""

    async def start(self) -> RankHello:
        folder = self.spec.config.model
        (folder / f"life-{self.spec.rank}-{self.spec.incarnation}").touch()
        life = len(list(folder.glob(f"life-{self.spec.rank}-*")))
        if life > 1 and (folder / "memory").exists():
            raise MemoryPlanError("the pool of 9 GiB does not fit the 8 GiB that are free")
        if life == 2:
            os._exit(9)
        return await super().start()


class BrokenWorker(ObedientWorker):
    async def start(self) -> RankHello:
        raise ZeroDivisionError("a bug at start")


class SilentWorker(ObedientWorker):
    async def start(self) -> RankHello:
        if self.spec.rank == 1:
            await asyncio.sleep(3600)
        return await super().start()


class UnlikeWorker(ObedientWorker):
    async def start(self) -> RankHello:
        return hello(self.spec.rank, incarnation=self.spec.incarnation, pool_pages=8 + self.spec.rank)


class RefusesTheOther(ObedientWorker):
    """Rank 1 cannot be a decode rank."""

    async def start(self) -> RankHello:
        if self.spec.rank == 1 and self.spec.config.role == "decode":
            await asyncio.sleep(0.3)  # after the other one has said that it can
            raise MemoryPlanError("the pool of 9 GiB does not fit the 8 GiB that are free")
        return await super().start()


class HungryInTheOther(ObedientWorker):
    """Rank 1 finds no memory as a decode rank, and the other one hears of that: what it waits for does not come."""

    async def start(self) -> RankHello:
        if self.spec.config.role == "decode":
            if self.spec.rank == 1:
                take_too_much()
            await asyncio.sleep(0.3)
            raise EngineError("the ranks could not compare their free memory")
        return await super().start()


class DiesInTheOther(ObedientWorker):
    """Rank 1 dies when it is to be a decode rank."""

    async def start(self) -> RankHello:
        if self.spec.rank == 1 and self.spec.config.role == "decode":
            os._exit(9)
        return await super().start()


class RefusesBoth(ObedientWorker):
    """A rank that was told to change its role can neither do that nor go back."""

    async def start(self) -> RankHello:
        if (self.spec.config.model / "switched").exists():
            raise MemoryPlanError("the pool of 9 GiB does not fit the 8 GiB that are free")
        if self.spec.config.role == "decode":
            (self.spec.config.model / "switched").touch()
            raise MemoryPlanError("the ring of 9 GiB does not fit the 8 GiB that are free")
        return await super().start()


class HangsInTheOther(ObedientWorker):
    async def start(self) -> RankHello:
        if self.spec.config.role == "decode":
            await asyncio.sleep(3600)
        return await super().start()


def _switching(spec: RankSpec, worker: type[ObedientWorker]) -> None:
    def refuse() -> Any:
        raise AssertionError("a rank has no leader")

    role = NodeRole(check_step_fits=lambda config: None, load_codec=lambda: CODEC, load_leader=refuse, load_worker=lambda: worker)
    run_rank(spec, CODEC, worker, role_of=lambda name: role)


def switching(spec: RankSpec) -> None:
    _switching(spec, ObedientWorker)


def refuses_the_other(spec: RankSpec) -> None:
    _switching(spec, RefusesTheOther)


def hungry_in_the_other(spec: RankSpec) -> None:
    _switching(spec, HungryInTheOther)


def dies_in_the_other(spec: RankSpec) -> None:
    _switching(spec, DiesInTheOther)


def refuses_both(spec: RankSpec) -> None:
    _switching(spec, RefusesBoth)


def hangs_in_the_other(spec: RankSpec) -> None:
    _switching(spec, HangsInTheOther)


def obedient(spec: RankSpec) -> None:
    run_rank(spec, CODEC, ObedientWorker)


def refused(spec: RankSpec) -> None:
    run_rank(spec, CODEC, RefusedWorker)


def hungry(spec: RankSpec) -> None:
    run_rank(spec, CODEC, HungryWorker)


def later_hungry(spec: RankSpec) -> None:
    run_rank(spec, CODEC, LaterHungryWorker)


def dying(spec: RankSpec) -> None:
    run_rank(spec, CODEC, DyingWorker)


def later_refused(spec: RankSpec) -> None:
    run_rank(spec, CODEC, LaterRefusedWorker)


def broken(spec: RankSpec) -> None:
    run_rank(spec, CODEC, BrokenWorker)


def silent(spec: RankSpec) -> None:
    run_rank(spec, CODEC, SilentWorker)


def unlike(spec: RankSpec) -> None:
    run_rank(spec, CODEC, UnlikeWorker)


def end_with_code(code: int) -> None:
    os._exit(code)


def stay(_: int) -> None:
    signal.pause()


def is_alive(pid: int) -> bool:
    """Whether a process runs (a dead one that nobody has waited for does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
