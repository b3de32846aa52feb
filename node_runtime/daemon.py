"""The life of a node: open its ports, start its ranks, serve, start them again when they die, drain, end with an exit code.

A node that has two roles is in one of them at a time; both roles' leaders live as long as the node does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, cast

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

STEADY_LIFE_S = 300.0  # ranks that served this long were no failed restart
_MOST_DOUBLINGS = 64  # from any pause to the longest there can be; 2**1024 is more than a float holds

log = structlog.get_logger(__name__)


def restart_pause_s(restart: RestartConfig, failures: int) -> float:
    """Return the pause before a restart, after so many failures in a row."""
    doublings = float(2 ** min(failures - 1, _MOST_DOUBLINGS))
    return min(restart.backoff_s * doublings, restart.max_backoff_s)


class NodeState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class RoleServer(Protocol):
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

    async def begin_life(self, hellos: tuple[RankReady, ...]) -> None:
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

    def collect_metrics(self) -> Iterable[MetricFamily]: ...

    @property
    def status_page(self) -> StatusPage | None:
        """What the HTTP server shows people; None: nothing."""
        ...

    async def close(self) -> None: ...


class SwitchableRole(RoleServer, Protocol):
    """One of two roles of a node."""

    @property
    def ranks(self) -> RankSide:
        """What the ranks are told to become."""
        ...

    def take_over(self, before: Any) -> None:
        """The ports and the ranks of the node are this role's from now on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRole:
    """What else a node can be.

    Args:
        config: Its settings then.
        make_role: Builds the role around the daemon.
    """

    config: NodeConfig
    make_role: Callable[[Daemon], SwitchableRole]


class Daemon:
    """Runs one node; `run()` is the process's life.

    Args:
        config: The node's settings.
        make_role: Builds the role around this daemon; a `SwitchableRole` where there is another one.
        other: The role that it can change to, and back from.
    """

    def __init__(self, config: NodeConfig, make_role: Callable[[Daemon], RoleServer], *, other: OtherRole | None = None) -> None:
        self.config = config
        self.other_config = None if other is None else other.config
        """Of the role that the node does not have now."""
        self.state = NodeState.STARTING
        self.num_restarts = 0
        self.started_s = time.monotonic()
        self.address = ""
        self.incarnation = 0
        """Of this life of the ranks, or of the last one."""
        self._role = make_role(self)
        self._other_role = None if other is None else other.make_role(self)
        self._switch_wanted = asyncio.Event()
        self._switched: asyncio.Future[None] | None = None
        self._can_switch = False
        self._stop = asyncio.Event()
        self._lost = asyncio.Event()
        self._lost_reason = ""
        self._health = HealthServer(
            self.readiness,
            lambda: self._role.collect_metrics(),
            page=self._role.status_page,
            host_names=(config.server.advertised_host, *config.status_page.host_names),
        )
        self._http_port = 0

    def readiness(self) -> Readiness:
        if self.state is not NodeState.READY:
            return Readiness(is_ready=False, reason=f"the node is {self.state}")
        return self._role.readiness()

    @property
    def is_stopping(self) -> bool:
        """Whether it has been asked to end."""
        return self._stop.is_set() or self.state is NodeState.DRAINING

    @property
    def http_port(self) -> int:
        """Of the HTTP server; 0 before it listens."""
        return self._http_port

    @property
    def can_switch(self) -> bool:
        """Whether the engines of the ranks can serve the other role, too."""
        return self._can_switch

    async def switch_role(self) -> None:
        """Change the role of a node on which nothing is in flight. Goes on when it is cancelled.

        Raises:
            PeerUnreachable: The node has no ranks now, or is being stopped.
            RankStartError: The ranks could not take the other role on; the node has the one that it had.
        """
        if self.state is not NodeState.READY or self._stop.is_set() or self._switched is not None:
            raise PeerUnreachable(f"the node is {self.state}")
        switched = self._switched = asyncio.get_running_loop().create_future()
        switched.add_done_callback(lambda done: None if done.cancelled() else done.exception())  # perhaps nobody waits for it
        self._switch_wanted.set()
        await asyncio.shield(switched)

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
            self._end_switch(PeerUnreachable("the node has shut down"))
            # Whatever happened: no rank process stays behind.
            await supervisor.stop(is_graceful=False)
            await self._role.close()
            if self._other_role is not None:
                await self._other_role.close()
            await self._health.stop()
            supervisor.cleanup()
            self._remove_ready_file()

    async def _live(self, supervisor: RankSupervisor) -> int:
        failures = 0
        while True:
            self._lost.clear()
            served_s, exit_code = 0.0, exit_codes.ENGINE_FAILED
            try:
                if not await self._start(supervisor):
                    return exit_codes.OK
                began_s = time.monotonic()
                while not self._lost.is_set():
                    await self._wait(self._stop, self._lost, self._switch_wanted)
                    if self._stop.is_set():
                        return await self._wind_down(supervisor)
                    if self._switch_wanted.is_set() and not self._lost.is_set() and not await self._switch(supervisor):
                        return exit_codes.OK
                self._end_switch(PeerUnreachable(self._lost_reason))
                served_s, reason = time.monotonic() - began_s, self._lost_reason
                await self._end_life(PeerUnreachable(reason))
            except RankStartError as error:
                log.error("start_failed", error=str(error))
                # What has served before can fail to start for a reason that passes, such as memory that is not back yet.
                is_for_good = error.exit_code in (exit_codes.BAD_CONFIG, exit_codes.NO_MEMORY) and not error.may_pass
                if self.num_restarts == 0 or is_for_good:
                    return error.exit_code
                reason, exit_code = str(error), error.exit_code
            await supervisor.stop(is_graceful=False)
            # Only deaths in a row speak of a node that cannot live; one a month does not add up.
            failures = 1 if served_s > STEADY_LIFE_S else failures + 1
            if failures > self.config.restart.max_restarts:
                log.error("too_many_restarts", restarts=self.config.restart.max_restarts, reason=reason)
                return exit_code
            self.num_restarts += 1
            await self._pause(failures)

    async def _pause(self, failures: int) -> None:
        """Before a restart; a stop cuts it short."""
        backoff_s = restart_pause_s(self.config.restart, failures)
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
        hellos = await self._unless_stopped(supervisor.start())
        if hellos is None:
            return False
        check_alike(hellos)
        await self._begin_life(supervisor, hellos)
        log.info("node_ready", address=self.address, http_port=self._http_port, ranks=len(hellos), restarts=self.num_restarts)
        return True

    async def _unless_stopped(self, starting: Coroutine[Any, Any, tuple[RankReady, ...]]) -> tuple[RankReady, ...] | None:
        """What the ranks say; None when the node is stopped meanwhile."""
        task = asyncio.ensure_future(starting)
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        return task.result()

    async def _begin_life(self, supervisor: RankSupervisor, hellos: tuple[RankReady, ...]) -> None:
        await self._role.begin_life(hellos)
        self.incarnation = supervisor.incarnation
        self._can_switch = all(hello.can_switch for hello in hellos)
        self.state = NodeState.READY
        turns_of(asyncio.get_running_loop()).start_counting()
        self._write_ready_file(supervisor)

    async def _switch(self, supervisor: RankSupervisor) -> bool:
        """Change the role, or keep it; False when the node is stopped meanwhile."""
        self._switch_wanted.clear()
        began_s, role_before, failure = time.monotonic(), self.config.role, None
        await self._end_life(PeerUnreachable("the node changes its role"))
        try:
            is_stopped = not await self._live_as_other(supervisor)
        except TransferError as error:
            failure = error
            log.error("role_switch_failed", wanted=self.config.role, reason=str(error))
            await self._role.end_life(error)
            is_stopped = not await self._live_as_before(supervisor, role_before, error)
        if failure is None and not is_stopped:
            life, switch_s = f"{supervisor.incarnation:#018x}", round(time.monotonic() - began_s, 3)
            log.info("role_switched", role_before=role_before, life=life, switch_s=switch_s)
        if not is_stopped:
            self._end_switch(failure)
        return not is_stopped

    async def _live_as_before(self, supervisor: RankSupervisor, role_before: str, why: TransferError) -> bool:
        """After a switch that failed. Ranks that cannot do that either are lost as if they had died: others are started for that
        role. False when the node is stopped meanwhile."""
        if supervisor.is_whole:
            try:
                return await self._live_as_other(supervisor)
            except TransferError as error:
                await self._role.end_life(error)
        if self.config.role != role_before:
            self._change_roles()
        supervisor.begin_as(self._switchable_role().ranks)
        self._on_lost(f"the ranks could not change their role: {why}")
        return True

    async def _live_as_other(self, supervisor: RankSupervisor) -> bool:
        """Begin a life of the same processes in the role that the node does not have; False when it is stopped meanwhile.

        Raises:
            TransferError: They could not.
        """
        self._change_roles()
        hellos = await self._unless_stopped(supervisor.switch(self._switchable_role().ranks))
        if hellos is None:
            return False
        check_alike(hellos)
        await self._begin_life(supervisor, hellos)
        return True

    def _change_roles(self) -> None:
        before, after = self._switchable_role(), self._other_role
        assert after is not None and self.other_config is not None
        after.take_over(before)
        self._role, self._other_role = after, before
        self._health.show(after.status_page)
        self.config, self.other_config = self.other_config, self.config
        rename_process(role=self.config.role)

    def _switchable_role(self) -> SwitchableRole:
        assert self._other_role is not None
        return cast(SwitchableRole, self._role)

    def _end_switch(self, error: TransferError | None) -> None:
        """Tell who waits for it."""
        switched, self._switched = self._switched, None
        self._switch_wanted.clear()
        if switched is not None and not switched.done():
            if error is None:
                switched.set_result(None)
            else:
                switched.set_exception(error)

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
