"""Run a node: open its ports, start its ranks, serve, restart ranks that die, drain, and end with an exit code.

Theory of operation. `Daemon.run` goes through lives of the ranks:

- Start: the ranks load the engine and say hello. A life begins, and the node is ready.
- Loss: a rank died, or a message was lost. Every request of the life ends, all ranks are killed, and after a pause new ranks
  start under a new incarnation. Too many losses in a row, or an error that no restart can fix, end the node.
- Change of role: a life ends without a loss, and the same processes begin one in the other role. If they cannot, they return to
  the former role, or are replaced by new ones. The leaders of both roles live as long as the node.
- Stop: the node drains, and ends the ranks. A second signal, or the time limit, cuts the drain short.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import structlog

from node_runtime import exit_codes
from node_runtime.health import HealthServer, Readiness
from node_runtime.status_page import StatusPage
from node_runtime.supervisor import RankSide, RankStartError, RankSupervisor, check_alike
from transfer.config import NodeConfig, RestartConfig
from transfer.connector.rank_report import RankReady
from transfer.errors import ConfigError, PeerUnreachable, TransferError
from transfer.logs import rename_process
from transfer.loop_turns import turns_of
from transfer.metrics import MetricFamily

STEADY_LIFE_S = 300.0  # a life this long ends the count of failed restarts
_MOST_DOUBLINGS = 64  # enough to reach any longest pause; 2**1024 would overflow a float

log = structlog.get_logger(__name__)


def restart_pause_s(restart: RestartConfig, failures: int) -> float:
    """Return the pause before a restart, given the number of failures in a row."""
    doublings = float(2 ** min(failures - 1, _MOST_DOUBLINGS))
    return min(restart.backoff_s * doublings, restart.max_backoff_s)


class NodeState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class RoleServer(Protocol):
    """The leader of a prefill or a decode node. Owned by the daemon's loop."""

    async def open(self) -> str:
        """Serve the role's gRPC API and return host:port. Calls are answered UNAVAILABLE until a life begins.

        Raises:
            ConfigError: The port cannot be bound.
        """
        ...

    @property
    def ranks(self) -> RankSide:
        """The part of the ranks that depends on the role."""
        ...

    def supervisor(self, on_lost: Callable[[str], None]) -> RankSupervisor:
        """Return the supervisor of the node's ranks; called for the role that the node begins with."""
        ...

    def take_over(self, before: Any) -> None:
        """Own the ports and the ranks of the node, in place of the leader of the other role."""
        ...

    async def begin_life(self, hellos: tuple[RankReady, ...]) -> None:
        """Serve with ranks that are ready."""
        ...

    async def end_life(self, error: TransferError) -> None:
        """End every request with `error`: the ranks are gone, or about to be."""
        ...

    async def drain(self) -> int:
        """Accept no new requests and wait for those in flight; return the remaining number if cancelled meanwhile."""
        ...

    @property
    def num_in_flight(self) -> int: ...

    def readiness(self) -> Readiness:
        """Return whether the role can serve a request once the node is started."""
        ...

    def collect_metrics(self) -> Iterable[MetricFamily]: ...

    @property
    def status_page(self) -> StatusPage | None: ...

    async def close(self) -> None: ...


class Daemon:
    """One node; `run()` is the life of its process.

    Args:
        config: Settings of the node.
        make_role: Makes the leader of the role that the settings are for.
        other_config: Settings of the role that the node can change to, and back from. None means that it has one role.
    """

    def __init__(
        self,
        config: NodeConfig,
        make_role: Callable[[Daemon, NodeConfig], RoleServer],
        *,
        other_config: NodeConfig | None = None,
    ) -> None:
        self.config = config
        self.other_config = other_config
        """Settings of the role that the node does not have now."""
        self.state = NodeState.STARTING
        self.num_restarts = 0
        self.address = ""
        self.incarnation = 0
        """Incarnation of the ranks' present life, or of the last one."""
        self._role = make_role(self, config)
        self._other_role = None if other_config is None else make_role(self, other_config)
        self._switch_wanted = asyncio.Event()
        self._switched: asyncio.Future[None] | None = None
        self.can_switch = False
        """Whether the engines of the ranks can also serve the other role."""
        self._was_ready = False
        self._stop = asyncio.Event()
        self._lost = asyncio.Event()
        self._lost_reason = ""
        self._health = HealthServer(
            self.readiness,
            lambda: self._role.collect_metrics(),
            page=self._role.status_page,
            host_names=(config.server.advertised_host, *config.status_page.host_names),
        )
        self.http_port = 0
        """Port of the HTTP server; 0 before it listens."""
        self._supervisor: RankSupervisor

    def readiness(self) -> Readiness:
        if self.state is not NodeState.READY:
            return Readiness(is_ready=False, reason=f"the node is {self.state}")
        return self._role.readiness()

    def readiness_changed(self) -> None:
        """Log `node_ready` when the answer of `/readyz` turns to 200, and the reason when it turns back.

        Call this after each event that can change it.
        """
        now = self.readiness()
        if now.is_ready and not self._was_ready:
            log.info("node_ready", address=self.address, http_port=self.http_port)
        elif self._was_ready and not now.is_ready:
            log.info("node_not_ready", reason=now.reason)
        self._was_ready = now.is_ready

    @property
    def is_stopping(self) -> bool:
        """Whether the node has been asked to end."""
        return self._stop.is_set() or self.state is NodeState.DRAINING

    async def switch_role(self) -> None:
        """Change the role of a node on which nothing is in flight. The change continues if this call is cancelled.

        Raises:
            PeerUnreachable: The node has no ranks now, or is being stopped.
            RankStartError: The ranks could not take the other role; the node keeps its role.
        """
        if self.state is not NodeState.READY or self._stop.is_set() or self._switched is not None:
            raise PeerUnreachable(f"the node is {self.state}")
        switched = self._switched = asyncio.get_running_loop().create_future()
        switched.add_done_callback(lambda done: None if done.cancelled() else done.exception())  # perhaps no caller waits for it
        self._switch_wanted.set()
        await asyncio.shield(switched)

    def request_stop(self) -> None:
        """Drain and end, as SIGTERM does. The second request ends the node without waiting."""
        if self._stop.is_set():
            log.warning("stop_requested_again")
        self._stop.set()

    async def run(self) -> int:
        """Serve until stopped; return the exit code.

        Raises:
            ConfigError: A port cannot be bound, or the ready file cannot be written.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        self._supervisor = self._role.supervisor(self._on_lost)
        try:
            self._remove_ready_file()  # left by an earlier process that was killed
            self.address = await self._role.open()
            self.http_port = await self._health.start(self.config.server.host, self.config.server.http_port)
            return await self._live()
        finally:
            self._end_switch(PeerUnreachable("the node has shut down"))
            # No rank process remains, in any case.
            await self._supervisor.stop(is_graceful=False)
            await self._role.close()
            if self._other_role is not None:
                await self._other_role.close()
            await self._health.stop()
            self._supervisor.cleanup()
            self._remove_ready_file()

    async def _live(self) -> int:
        failures = 0
        while True:
            self._lost.clear()
            served_s, exit_code = 0.0, exit_codes.ENGINE_FAILED
            try:
                if not await self._start():
                    return exit_codes.OK
                began_s = time.monotonic()
                while not self._lost.is_set():
                    await self._wait(self._stop, self._lost, self._switch_wanted)
                    if self._stop.is_set():
                        return await self._wind_down()
                    if self._switch_wanted.is_set() and not self._lost.is_set() and not await self._switch():
                        return exit_codes.OK
                self._end_switch(PeerUnreachable(self._lost_reason))
                served_s, reason = time.monotonic() - began_s, self._lost_reason
                await self._end_life(PeerUnreachable(reason))
            except RankStartError as error:
                log.error("start_failed", error=str(error))
                # Ranks that have served before can fail to start for a temporary reason, such as memory that is not free yet.
                is_for_good = error.exit_code in (exit_codes.BAD_INPUT, exit_codes.DOES_NOT_FIT) and not error.may_pass
                if self.num_restarts == 0 or is_for_good:
                    return error.exit_code
                reason, exit_code = str(error), error.exit_code
            await self._supervisor.stop(is_graceful=False)
            # Only deaths in a row count: rare ones must not add up.
            failures = 1 if served_s > STEADY_LIFE_S else failures + 1
            if failures > self.config.restart.max_restarts:
                log.error("too_many_restarts", restarts=self.config.restart.max_restarts, reason=reason)
                return exit_code
            self.num_restarts += 1
            await self._pause(failures)

    async def _pause(self, failures: int) -> None:
        """Wait before a restart; a stop ends the wait."""
        backoff_s = restart_pause_s(self.config.restart, failures)
        log.warning("restarting_ranks", restart=self.num_restarts, backoff_s=backoff_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), backoff_s)

    async def _end_life(self, error: TransferError) -> None:
        """Withdraw readiness and the ready file: the ranks are gone, or about to be."""
        self.state = NodeState.STARTING
        self.readiness_changed()
        self._remove_ready_file()
        await self._role.end_life(error)

    async def _start(self) -> bool:
        """Begin a life; return False if the node is stopped meanwhile.

        Raises:
            RankStartError: The ranks cannot start.
        """
        return await self._begin_life(self._supervisor.start())

    async def _unless_stopped(self, starting: Coroutine[Any, Any, tuple[RankReady, ...]]) -> tuple[RankReady, ...] | None:
        """Return the ranks' hellos; None means that the node was stopped meanwhile."""
        task = asyncio.ensure_future(starting)
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        return task.result()

    async def _begin_life(self, starting: Coroutine[Any, Any, tuple[RankReady, ...]]) -> bool:
        """Serve with the ranks that `starting` returns; return False if the node is stopped meanwhile."""
        hellos = await self._unless_stopped(starting)
        if hellos is None:
            return False
        check_alike(hellos)
        await self._role.begin_life(hellos)
        self.incarnation = self._supervisor.incarnation
        self.can_switch = all(hello.can_switch for hello in hellos)
        self.state = NodeState.READY
        turns_of(asyncio.get_running_loop()).start_counting()
        self._write_ready_file()
        ranks = self.config.parallel.tp_size
        log.info("ranks_ready", address=self.address, http_port=self.http_port, ranks=ranks, restarts=self.num_restarts)
        self.readiness_changed()
        return True

    async def _switch(self) -> bool:
        """Change the role, or keep it if the ranks cannot change; return False if the node is stopped meanwhile."""
        self._switch_wanted.clear()
        began_s, role_before, failure = time.monotonic(), self.config.role, None
        await self._end_life(PeerUnreachable("the node changes its role"))
        try:
            is_stopped = not await self._live_as_other()
        except TransferError as error:
            failure = error
            log.error("role_switch_failed", wanted=self.config.role, reason=str(error))
            await self._role.end_life(error)
            is_stopped = not await self._live_as_before(role_before, error)
        if failure is None and not is_stopped:
            life, switch_s = f"{self._supervisor.incarnation:#018x}", round(time.monotonic() - began_s, 3)
            log.info("role_switched", role_before=role_before, life=life, switch_s=switch_s)
        if not is_stopped:
            self._end_switch(failure)
        return not is_stopped

    async def _live_as_before(self, role_before: str, why: TransferError) -> bool:
        """Return to the former role after a switch that failed; return False if the node is stopped meanwhile.

        Ranks that cannot return either count as dead: others are started for the former role.
        """
        if self._supervisor.is_whole:
            try:
                return await self._live_as_other()
            except TransferError as error:
                await self._role.end_life(error)
        if self.config.role != role_before:
            self._change_roles()
        self._supervisor.begin_as(self._role.ranks)
        self._on_lost(f"the ranks could not change their role: {why}")
        return True

    async def _live_as_other(self) -> bool:
        """Begin a life of the same processes in the other role; return False if the node is stopped meanwhile.

        Raises:
            TransferError: The ranks could not.
        """
        self._change_roles()
        return await self._begin_life(self._supervisor.switch(self._role.ranks))

    def _change_roles(self) -> None:
        before, after = self._role, self._other_role
        assert after is not None and self.other_config is not None
        after.take_over(before)
        self._role, self._other_role = after, before
        self._health.show(after.status_page)
        self.config, self.other_config = self.other_config, self.config
        rename_process(role=self.config.role)

    def _end_switch(self, error: TransferError | None) -> None:
        """Answer the pending `switch_role`, if any: None means success."""
        switched, self._switched = self._switched, None
        self._switch_wanted.clear()
        if switched is not None and not switched.done():
            if error is None:
                switched.set_result(None)
            else:
                switched.set_exception(error)

    async def _wind_down(self) -> int:
        """Drain for at most `drain_timeout_s`, then end the ranks."""
        self.state = NodeState.DRAINING
        self.readiness_changed()
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
        await self._supervisor.stop(is_graceful=True)
        log.info("stopped", cut_off=remaining)
        return exit_codes.ABORTED if remaining else exit_codes.OK

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

    def _write_ready_file(self) -> None:
        path = self.config.ready_file
        if path is None:
            return
        content: dict[str, Any] = {
            "role": self.config.role,
            "pid": os.getpid(),
            "rank_pids": self._supervisor.pids,
            "address": self.address,
            "http_address": f"{self.config.server.advertised_host}:{self.http_port}",
            "incarnation": f"{self._supervisor.incarnation:#018x}",  # text, as in the log: JSON readers would round a number
        }
        temporary = Path(f"{path}.new")
        try:
            temporary.write_text(json.dumps(content))
            temporary.replace(path)  # readers see a complete file
        except OSError as error:
            raise ConfigError(f"ready_file is {path}, which cannot be written: {error.strerror}") from error

    def _remove_ready_file(self) -> None:
        if self.config.ready_file is not None:
            with contextlib.suppress(OSError):
                Path(self.config.ready_file).unlink()
