"""The life of a node: open its ports, start its ranks, serve, start them again when they die, drain, end with an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import structlog

from node_runtime import exit_codes
from node_runtime.health import HealthServer, Readiness
from node_runtime.rank_report import RankHello
from node_runtime.supervisor import RankStartError, RankSupervisor, check_alike
from transfer.config import NodeConfig
from transfer.errors import ConfigError, PeerUnreachable, TransferError

STEADY_LIFE_S = 300.0  # ranks that served this long were no failed restart

log = structlog.get_logger(__name__)


class NodeState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Role(Protocol):
    """What makes a node a prefill or a decode node. Owned by the daemon's loop."""

    async def open(self) -> str:
        """Serve the role's gRPC API; returns host:port. Calls are answered UNAVAILABLE until a life begins.

        Raises:
            ConfigError: The port cannot be bound.
        """
        ...

    def supervisor(self, on_lost: Callable[[str], None]) -> RankSupervisor:
        """The role's ranks."""
        ...

    async def begin_life(self, hellos: tuple[RankHello, ...]) -> None:
        """The ranks are there."""
        ...

    async def end_life(self, error: TransferError) -> None:
        """The ranks are gone, or about to be: every request ends with `error`."""
        ...

    async def drain(self) -> int:
        """Take no new requests and wait until those in flight are over; the remaining number if cancelled meanwhile."""
        ...

    @property
    def num_in_flight(self) -> int: ...

    def readiness(self) -> Readiness:
        """Beyond being started: whether the role can serve a request."""
        ...

    def render_metrics(self) -> bytes: ...

    async def close(self) -> None: ...


class Daemon:
    """Runs one node; `run()` is the process's life.

    Args:
        config: The node's settings.
        make_role: Builds the role around this daemon.
    """

    def __init__(self, config: NodeConfig, make_role: Callable[[Daemon], Role]) -> None:
        self.config = config
        self.state = NodeState.STARTING
        self.num_restarts = 0
        self.started_s = time.monotonic()
        self.address = ""
        self._role = make_role(self)
        self._stop = asyncio.Event()
        self._lost = asyncio.Event()
        self._lost_reason = ""
        self._health = HealthServer(self.readiness, self._role.render_metrics)
        self._http_port = 0

    def readiness(self) -> Readiness:
        if self.state is not NodeState.READY:
            return Readiness(is_ready=False, reason=f"the node is {self.state}")
        return self._role.readiness()

    def request_stop(self) -> None:
        """Drain and end, as SIGTERM does; a second time, end without waiting."""
        if self._stop.is_set():
            log.warning("stop_requested_again")
        self._stop.set()

    async def run(self) -> int:
        """Serve until stopped; returns the exit code.

        Raises:
            ConfigError: A port cannot be bound, or the ready file cannot be written.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        supervisor = self._role.supervisor(self._on_lost)
        try:
            self._remove_ready_file()  # of an earlier process that was killed
            self.address = await self._role.open()
            self._http_port = await self._health.start(self.config.server.host, self.config.server.http_port)
            return await self._live(supervisor)
        finally:
            # Whatever happened: no rank process stays behind.
            await supervisor.stop(is_graceful=False)
            await self._role.close()
            await self._health.stop()
            supervisor.cleanup()
            self._remove_ready_file()

    async def _live(self, supervisor: RankSupervisor) -> int:
        failures = 0
        while True:
            self._lost.clear()
            served_s = 0.0
            try:
                if not await self._start(supervisor):
                    return exit_codes.OK
                began_s = time.monotonic()
                await self._wait(self._stop, self._lost)
                if self._stop.is_set():
                    return await self._wind_down(supervisor)
                served_s, reason = time.monotonic() - began_s, self._lost_reason
                await self._end_life(PeerUnreachable(reason))
            except RankStartError as error:
                log.error("start_failed", error=str(error))
                # What has served before can fail to start for a reason that passes, such as memory that is not back yet.
                if self.num_restarts == 0 or error.exit_code in (exit_codes.BAD_CONFIG, exit_codes.NO_MEMORY):
                    return error.exit_code
                reason = str(error)
            await supervisor.stop(is_graceful=False)
            # Only deaths in a row speak of a node that cannot live; one a month does not add up.
            failures = 1 if served_s > STEADY_LIFE_S else failures + 1
            if failures > self.config.restart.max_restarts:
                log.error("too_many_restarts", restarts=self.config.restart.max_restarts, reason=reason)
                return exit_codes.ENGINE_FAILED
            self.num_restarts += 1
            await self._pause(failures)

    async def _pause(self, failures: int) -> None:
        """Before a restart; a stop cuts it short."""
        backoff_s = min(self.config.restart.backoff_s * 2 ** (failures - 1), self.config.restart.max_backoff_s)
        log.warning("restarting_ranks", restart=self.num_restarts, backoff_s=backoff_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), backoff_s)

    async def _end_life(self, error: TransferError) -> None:
        """There are no ranks, or soon will not be: nobody shall take the node for ready, or its file for true."""
        self.state = NodeState.STARTING
        self._remove_ready_file()
        await self._role.end_life(error)

    async def _start(self, supervisor: RankSupervisor) -> bool:
        """Begin a life; False when the node is stopped meanwhile.

        Raises:
            RankStartError: The ranks cannot start.
        """
        starting = asyncio.ensure_future(supervisor.start())
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return False
        hellos = starting.result()
        check_alike(hellos)
        await self._role.begin_life(hellos)
        self.state = NodeState.READY
        self._write_ready_file(supervisor)
        log.info("node_ready", address=self.address, http_port=self._http_port, ranks=len(hellos), restarts=self.num_restarts)
        return True

    async def _wind_down(self, supervisor: RankSupervisor) -> int:
        """Drain within the budget, then end the ranks."""
        self.state = NodeState.DRAINING
        log.info("draining", in_flight=self._role.num_in_flight)
        self._stop.clear()  # from now on a second signal cuts the wait short
        draining = asyncio.ensure_future(self._role.drain())
        again = asyncio.ensure_future(self._wait(self._stop, self._lost))
        await asyncio.wait({draining, again}, timeout=self.config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        remaining = self._role.num_in_flight
        for task in (draining, again):
            task.cancel()
        await asyncio.gather(draining, again, return_exceptions=True)
        await self._role.end_life(PeerUnreachable("the node has shut down"))
        await supervisor.stop(is_graceful=True)
        log.info("stopped", cut_off=remaining)
        return exit_codes.NOT_DRAINED if remaining else exit_codes.OK

    async def _wait(self, *events: asyncio.Event) -> None:
        tasks = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _on_lost(self, reason: str) -> None:
        self._lost_reason = reason
        self._lost.set()

    def _write_ready_file(self, supervisor: RankSupervisor) -> None:
        path = self.config.ready_file
        if path is None:
            return
        content: dict[str, Any] = {
            "role": self.config.role,
            "pid": os.getpid(),
            "rank_pids": supervisor.pids,
            "address": self.address,
            "http_address": f"{self.config.server.advertised_host}:{self._http_port}",
            "incarnation": f"{supervisor.incarnation:#018x}",  # as in the log; as a number, JSON readers would round it
        }
        temporary = Path(f"{path}.new")
        try:
            temporary.write_text(json.dumps(content))
            temporary.replace(path)  # whoever waits for the file sees it whole
        except OSError as error:
            raise ConfigError(f"ready_file is {path}, which cannot be written: {error.strerror}") from error

    def _remove_ready_file(self) -> None:
        if self.config.ready_file is not None:
            with contextlib.suppress(OSError):
                Path(self.config.ready_file).unlink()
