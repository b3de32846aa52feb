"""Entry points of rank processes without an engine, for `RankGroup` and `RankSupervisor` in these tests."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from node_runtime.rank_engine import RankEngine
from node_runtime.rank_link import RankCodec, RankLink
from node_runtime.rank_messages import RankLogLevel, RankShutdown, RankSwitch
from node_runtime.rank_process import run_rank
from node_runtime.rank_worker import RankSpec
from tests.runtime.instances import hello
from transfer.connector.rank_report import RankReady, RankReport, RankStartFailed
from transfer.errors import LocalProtocolError, MemoryPlanError

IMPORTING = "KVFERRY_TEST_IMPORTING"
"""In the environment of `slow_preload`: path of the file that ends its import when it is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An action of a rank: "echo", "raise", "hunger" (ask for too much memory), "exit", "freeze", "block" (its loop),
    "contradict" (itself), "hang" (at close)."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    pid: int
    incarnation: int
    is_spared: bool
    """Whether no collection of garbage looks at the rank's worker."""


CODEC = RankCodec(Order, Echo, RankReady, RankStartFailed, RankReport, RankLogLevel, RankShutdown, RankSwitch)


def take_too_much() -> None:
    mmap.mmap(-1, 2**60)  # the system refuses it


class ObedientWorker:
    """A `node_runtime.rank_worker.Worker` that tests control by messages."""

    def __init__(self, spec: RankSpec, link: RankLink, loop: asyncio.AbstractEventLoop, engine: RankEngine) -> None:
        self.spec = spec
        self.link = link
        self.hangs_at_close = False
        self.is_broken = False

    async def start(self) -> RankReady:
        return hello(self.spec.rank, incarnation=self.spec.incarnation, pid=os.getpid())

    def on_message(self, message: Any) -> None:
        match message.what:
            case "echo":
                is_spared = all(one is not self for one in gc.get_objects())
                echo = Echo(pid=os.getpid(), incarnation=self.spec.incarnation, is_spared=is_spared)
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


Script = Callable[[RankSpec], Awaitable[None]]
"""Runs at the start of a rank's life, before its hello."""

POOL_TOO_LARGE = "the pool of 9 GiB does not fit the 8 GiB that are free"


class ScriptedWorker(ObedientWorker):
    def __init__(self, script: Script, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.script = script

    async def start(self) -> RankReady:
        await self.script(self.spec)
        return await super().start()


def _run(script: Script, spec: RankSpec) -> None:
    """Be a rank whose worker is the same in both roles."""
    run_rank(spec, parts_of=lambda role: (CODEC, partial(ScriptedWorker, script)))


def _life_of(spec: RankSpec) -> int:
    """The number of the life that begins, counted by files in the model's folder."""
    folder = spec.config.model
    (folder / f"life-{spec.rank}-{spec.incarnation}").touch()
    return len(list(folder.glob(f"life-{spec.rank}-*")))


async def _obey(spec: RankSpec) -> None: ...


async def _refuse(spec: RankSpec) -> None:
    if spec.rank == 1:
        raise MemoryPlanError(POOL_TOO_LARGE)


async def _hunger(spec: RankSpec) -> None:
    """Ask for more memory than there is."""
    if spec.rank == 1:
        take_too_much()


async def _hunger_beside(spec: RankSpec) -> None:
    """Ask for more memory than there is, in work beside the start."""
    if spec.rank == 1:
        asyncio.get_running_loop().call_soon(take_too_much)
        await asyncio.sleep(3600)


async def _hunger_later(spec: RankSpec) -> None:
    """In a node's second life; where the model's folder has a file "for ever", in later lives too."""
    life = _life_of(spec)
    if spec.rank == 1 and (life == 2 or (life > 2 and (spec.config.model / "for ever").exists())):
        take_too_much()


async def _refuse_later(spec: RankSpec) -> None:
    """Fail in a node's second life, for ever where there is a file "memory" in the model's folder."""
    life = _life_of(spec)
    if life > 1 and (spec.config.model / "memory").exists():
        raise MemoryPlanError(POOL_TOO_LARGE)
    if life == 2:
        os._exit(9)


async def _die(spec: RankSpec) -> None:
    if spec.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


async def _break(spec: RankSpec) -> None:
    raise ZeroDivisionError("a bug at start")


async def _say_nothing(spec: RankSpec) -> None:
    if spec.rank == 1:
        await asyncio.sleep(3600)


async def _say_nothing_later(spec: RankSpec) -> None:
    """Start in a node's first life only."""
    if _life_of(spec) > 1:
        await _say_nothing(spec)


async def _refuse_the_other(spec: RankSpec) -> None:
    if spec.rank == 1 and spec.config.role == "decode":
        await asyncio.sleep(0.3)  # after the other one has said that it can
        raise MemoryPlanError(POOL_TOO_LARGE)


async def _die_in_the_other(spec: RankSpec) -> None:
    if spec.rank == 1 and spec.config.role == "decode":
        os._exit(9)


async def _hang_in_the_other(spec: RankSpec) -> None:
    if spec.config.role == "decode":
        await asyncio.sleep(3600)


async def _refuse_both(spec: RankSpec) -> None:
    """Refuse the other role, and then also the former one."""
    if (spec.config.model / "switched").exists():
        raise MemoryPlanError(POOL_TOO_LARGE)
    if spec.config.role == "decode":
        (spec.config.model / "switched").touch()
        raise MemoryPlanError("the ring of 9 GiB does not fit the 8 GiB that are free")


obedient = partial(_run, _obey)
refused = partial(_run, _refuse)
hungry = partial(_run, _hunger)
hungry_beside = partial(_run, _hunger_beside)
later_hungry = partial(_run, _hunger_later)
later_refused = partial(_run, _refuse_later)
dying = partial(_run, _die)
broken = partial(_run, _break)
silent = partial(_run, _say_nothing)
later_silent = partial(_run, _say_nothing_later)
refuses_the_other = partial(_run, _refuse_the_other)
dies_in_the_other = partial(_run, _die_in_the_other)
hangs_in_the_other = partial(_run, _hang_in_the_other)
refuses_both = partial(_run, _refuse_both)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
