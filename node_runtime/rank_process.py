"""Run one rank process: start, say hello, serve the leader, report, and end or become a rank of the other role.

A rank never outlives its leader. An unexpected exception ends it at once: the leader sees the exit, ends the group, and starts a
new one under a new incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from node_runtime import exit_codes
from node_runtime.node_role import rank_parts
from node_runtime.process_setup import freeze_gc, keep_freed_memory, raise_open_files
from node_runtime.rank_engine import RankEngine
from node_runtime.rank_group import watch_leader
from node_runtime.rank_link import RankCodec, RankLink
from node_runtime.rank_messages import RankLogLevel, RankShutdown, RankSwitch
from node_runtime.rank_worker import RankSpec, Worker, WorkerFactory
from planner.memory_advice import Phase, advice_for
from transfer.connector.rank_report import RankReport, RankStartFailed, process_figures
from transfer.errors import OutOfMemory, TransferError
from transfer.logs import configure_logging, rename_process, set_log_level
from transfer.loop_turns import run_measured, turns_of
from transfer.out_of_memory import allocating, is_out_of_memory, out_of_memory

REPORT_S = 0.25
SIGN_OF_LIFE_S = 1.0  # longest time between two reports of a rank whose state does not change
REFUSAL_HEARD_S = 5.0
SWITCH_INTERVAL_S = 0.0005  # the engine's thread holds the interpreter lock for long; the loop must get its turn

log = structlog.get_logger(__name__)


def run_rank(spec: RankSpec, *, parts_of: Callable[[str], tuple[RankCodec, WorkerFactory]] = rank_parts) -> None:
    """Run a rank until its leader ends it; exit the process. The entry point of every rank.

    Args:
        parts_of: Returns the messages and the worker of a role.
    """
    # Ctrl-C of a terminal and SIGTERM of a service manager reach every process of the node; only the leader reacts to them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_open_files()
    if spec.config.device == "cpu":
        keep_freed_memory()
    configure_logging(spec.config.log, role=spec.config.role, rank=spec.rank, incarnation=spec.incarnation)
    code = exit_codes.FAILED
    try:
        code = run_measured(_serve(spec, parts_of))
    except Exception as error:
        code = _log_crash(spec, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: a thread that is stuck in a collective must not keep the process.
        os._exit(code)


async def _serve(spec: RankSpec, parts_of: Callable[[str], tuple[RankCodec, WorkerFactory]]) -> int:
    loop = asyncio.get_running_loop()
    watch_leader(loop, lambda: _end_without_leader(spec.rendezvous.parent))
    loop.set_exception_handler(partial(_crash, spec))
    engine = RankEngine(loop)
    is_switched = False
    while True:
        codec, make_worker = parts_of(spec.config.role)
        over = await _live(spec, codec, make_worker, engine, is_switched=is_switched)
        if not isinstance(over, RankSwitch):
            return over
        spec, is_switched = spec.switched(over), True
        rename_process(role=over.role, incarnation=over.incarnation)


async def _live(
    spec: RankSpec, codec: RankCodec, make_worker: WorkerFactory, engine: RankEngine, *, is_switched: bool
) -> int | RankSwitch:
    """Run one worker to its end; return the exit code, or the change of role that ended it."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[RankShutdown | RankSwitch] = loop.create_future()
    link = RankLink(spec.address, codec)
    worker = make_worker(spec, link, loop, engine)

    def on_message(message: Any) -> None:
        if isinstance(message, RankShutdown | RankSwitch):
            if not over.done():
                over.set_result(message)
        elif isinstance(message, RankLogLevel):
            set_log_level(message.level)
        elif not over.done():
            worker.on_message(message)

    link.watch(loop, on_message)
    try:
        with allocating(f"starting rank {spec.rank}", device=spec.device, advice=advice_for(Phase.START, spec.config)):
            hello = await worker.start()
    except TransferError as error:
        code = exit_codes.exit_code_of(error)
        log.debug("rank_start_failed", error=str(error))  # the leader logs the error once for all ranks
        may_pass = isinstance(error, OutOfMemory)
        link.send(RankStartFailed(rank=spec.rank, reason=str(error), exit_code=code, may_pass=may_pass))
        # The leader ends a node that cannot start. A node that had another role returns to it once every rank has answered, which
        # can take long; `watch_leader` notices a leader that has ended.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over, timeout=None if is_switched else REFUSAL_HEARD_S)
        if over.done() and not over.cancelled() and isinstance(order := over.result(), RankSwitch):
            link.close()
            return order
        return code
    freeze_gc()
    turns_of(loop).start_counting()
    link.send(hello)
    log.info("rank_ready", pid=hello.pid, pool_pages=hello.pool_pages)
    await _report(spec.rank, worker, link, over)
    order = over.result()
    await worker.close()
    if isinstance(order, RankSwitch):
        await engine.rest()
    else:
        await engine.close()
    link.close()
    return order if isinstance(order, RankSwitch) else exit_codes.OK


def _end_without_leader(folder: Path) -> None:
    """Remove the folder that a killed leader shared with its ranks, and exit."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(exit_codes.LEADER_GONE)


async def _report(rank: int, worker: Worker, link: RankLink, over: asyncio.Future[Any]) -> None:
    """Report state and metrics when they have changed, and at least every `SIGN_OF_LIFE_S`, until `over` is done.

    An idle rank checks its invariants before each report. A broken invariant can hand out memory twice, so it ends the rank like
    any other bug.
    """
    last: dict[str, Any] = {}
    last_s = 0.0
    num_checks = 0
    while not over.done():
        status, now_s = worker.status(), time.monotonic()
        if status != last or now_s - last_s >= SIGN_OF_LIFE_S:
            last, last_s = status, now_s
            num_checks += worker.check_idle()
            status = status | process_figures() | {"idle_checks": num_checks}
            link.send(RankReport(rank=rank, status=status, metrics=worker.metrics(status)))
        await asyncio.wait({over}, timeout=REPORT_S)


def _crash(spec: RankSpec, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if error is None:
        loop.default_exception_handler(context)
        return
    code = _log_crash(spec, error)
    sys.stderr.flush()
    os._exit(code)


def _log_crash(spec: RankSpec, error: BaseException) -> int:
    """Log the error that ends the rank, and return the exit code."""
    if is_out_of_memory(error):  # for example in a copy; not a bug, so it is logged without a traceback
        advice = advice_for(Phase.COPY, spec.config)
        line = out_of_memory(error, f"copying KV on rank {spec.rank}", device=spec.device, advice=advice)
        log.critical("rank_out_of_memory", error=str(line))
        return exit_codes.DOES_NOT_FIT
    log.critical("rank_crashed", error=str(error), exc_info=error)
    return exit_codes.FAILED
