"""A leader and its ranks: real processes that start, refuse, crash, are killed, freeze, and are gone in the end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from kvferry.local_cluster.fork_server import SharedForkServer
from node_runtime import supervisor as supervisor_module
from node_runtime.fork_server import end_fork_server, fork_server_pid
from node_runtime.rank_link import LeaderLink
from node_runtime.rank_worker import RankSpec
from node_runtime.supervisor import RankStartError
from tests.runtime import rank_entries
from tests.runtime.daemons import Ranks, ranks_of
from tests.runtime.instances import until
from tests.runtime.rank_entries import Echo, Order, is_alive
from transfer.errors import LocalProtocolError

ECHO = Order(what="echo")
GRACE_S = 0.01  # no rank dies within it


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


NO_MEMORY = "memory ran out; the log of the rank names the work and the settings"


@pytest.mark.parametrize(
    ("order", "how", "line", "is_traced"),
    [
        ("raise", "exit code 1", "RuntimeError: a bug of the rank", True),
        ("exit", "exit code 9", "", False),
        ("contradict", "exit code 1", "R5: no live grant, watermark 5, head 6", True),
        # For example a copy of KV, besides the rank's steps. It is not a bug.
        ("hunger", f"exit code 8 ({NO_MEMORY})", "out of memory while copying KV on rank 1: ", False),
        ("", "killed by signal 9", "", False),
    ],
    ids=["a bug", "an exit", "it contradicts itself while it is idle", "no memory", "killed"],
)
async def test_the_death_of_one_rank_loses_the_life_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], order: str, how: str, line: str, is_traced: bool
) -> None:
    async with ranks_of(tmp_path, rank_entries.obedient) as ranks:
        await ranks.supervisor.start()
        if order:
            ranks.supervisor.send(1, Order(what=order))
        else:
            os.kill(ranks.supervisor.pids[1], signal.SIGKILL)
        await until(lambda: ranks.lost)
        assert ranks.lost == [f"rank 1 died: {how}"]
        os.kill(ranks.supervisor.pids[0], signal.SIGKILL)
        ranks.supervisor.lose("for another reason")
        await asyncio.sleep(0.1)
        assert len(ranks.lost) == 1
    said = "".join(capfd.readouterr())
    assert line in said and ("Traceback" in said or "rank_crashed" in said) is is_traced


def a_rank_takes_no_broadcast(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaderLink, "broadcast", lambda *_: False)
    for _ in range(2):
        ranks.supervisor.broadcast(ECHO)


def a_rank_takes_no_message(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaderLink, "send", lambda *_: False)
    for _ in range(2):
        ranks.supervisor.send(1, ECHO)


def a_socket_ends_before_its_rank_is_known_to_be_dead(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "EXIT_GRACE_S", 60.0)
    os.kill(ranks.supervisor.pids[1], signal.SIGKILL)
    a_rank_takes_no_broadcast(ranks, monkeypatch)


def a_message_cannot_be_sent(ranks: Ranks, _: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(LocalProtocolError):
            ranks.supervisor.broadcast("of no class of the link")


def the_leader_fails_over_a_message(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rank: int, message: object) -> None:
        raise KeyError("no such request")

    ranks.on_message = fail
    for _ in range(2):
        ranks.supervisor.send(1, ECHO)


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (a_rank_takes_no_broadcast, "a rank does not take messages"),
        (a_rank_takes_no_message, "rank 1 does not take messages"),
        (a_socket_ends_before_its_rank_is_known_to_be_dead, "rank 1 died: killed by signal 9"),
        (a_message_cannot_be_sent, "a message to the ranks cannot be sent: str is not a message of this link"),
        (the_leader_fails_over_a_message, "Echo of rank 1 could not be handled: KeyError('no such request')"),
    ],
    ids=[
        "a broadcast is not taken",
        "a message is not taken",
        "its socket ended first",
        "it cannot be sent",
        "it is not handled",
    ],
)
async def test_a_lost_message_ends_the_life_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Ranks, pytest.MonkeyPatch], None], reason: str
) -> None:
    """Leader and ranks would differ from then on, and memory that one holds for the other would never be released."""
    async with ranks_of(tmp_path, rank_entries.obedient) as ranks:
        await ranks.supervisor.start()
        monkeypatch.setattr(supervisor_module, "EXIT_GRACE_S", GRACE_S)
        happens(ranks, monkeypatch)
        is_over = asyncio.Event()
        asyncio.get_running_loop().call_later(GRACE_S, is_over.set)
        await until(lambda: ranks.lost and is_over.is_set())
        assert ranks.lost == [reason]


async def test_the_leader_goes_on_while_ranks_are_forked_and_a_stop_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_fork_server()  # of an earlier test, which has imported already
    importing = tmp_path / "importing"
    monkeypatch.setenv(rank_entries.IMPORTING, str(importing))
    async with ranks_of(tmp_path, rank_entries.obedient, preload=["tests.runtime.slow_preload"]) as ranks:
        starting = asyncio.ensure_future(ranks.supervisor.start())
        await until(importing.exists)
        assert not any(ranks.supervisor.pids), "the leader did not wait for the import"
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        asyncio.get_running_loop().call_soon(importing.unlink)  # once the stop waits for the fork
        await ranks.supervisor.stop(is_graceful=False)
        await ranks.supervisor.start()  # its ranks are forked after whatever is left to be forked
        server = fork_server_pid()
        assert server is not None
        left = set(children_of(server)) - set(ranks.supervisor.pids)
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # the fork server would wait for it
        assert not left


async def test_a_new_life_has_a_new_incarnation_and_hears_nothing_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[Callable[[], None]] = []
    async with ranks_of(tmp_path, rank_entries.obedient) as ranks:
        await ranks.supervisor.start()
        first = ranks.supervisor.incarnation
        ranks.supervisor.broadcast(ECHO)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "call_later", lambda _, *call: timers.append(partial(*call)))
            ranks.supervisor.lose_soon("of the first life")
        await ranks.supervisor.stop(is_graceful=False)
        hellos = await ranks.supervisor.start()
        assert ranks.supervisor.incarnation != first
        (end_of_grace,) = timers
        end_of_grace()
        assert not ranks.lost
        ranks.heard.clear()
        ranks.supervisor.broadcast(ECHO)
        await until(lambda: len(ranks.heard) >= 2)
        assert {message.incarnation for _, message in ranks.heard} == {hellos[0].instance.incarnation}


@pytest.mark.parametrize(
    ("entry", "reason", "exit_code"),
    [
        (rank_entries.refused, "the pool of 9 GiB does not fit the 8 GiB that are free", 8),
        (rank_entries.hungry, "out of memory while starting rank 1: an unknown number of bytes asked for, the host has ", 8),
        (rank_entries.hungry_beside, f"rank 1 ended while it started: exit code 8 ({NO_MEMORY})", 8),
        (rank_entries.dying, "rank 1 ended while it started: killed by signal 9", 9),
        (rank_entries.broken, "ended while it started: exit code 1", 9),
    ],
)
async def test_a_rank_that_cannot_start_ends_the_start_with_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], entry: Callable[[RankSpec], None], reason: str, exit_code: int
) -> None:
    async with ranks_of(tmp_path, entry) as ranks:
        with pytest.raises(RankStartError) as refusal:
            await ranks.supervisor.start()
        assert reason in str(refusal.value)
        assert refusal.value.exit_code == exit_code
        assert not ranks.lost, "there was no life yet that could be lost"
    said = "".join(capfd.readouterr())
    assert ("rank_crashed" in said and "ZeroDivisionError: a bug at start" in said) is (entry is rank_entries.broken)


async def test_a_rank_that_says_nothing_ends_the_start_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ranks_of(tmp_path, rank_entries.later_silent) as ranks:
        await ranks.supervisor.start()  # the fork server has imported everything
        await ranks.supervisor.stop(is_graceful=False)
        monkeypatch.setattr(supervisor_module, "START_TIMEOUT_S", 3.0)
        with pytest.raises(RankStartError, match=r"ranks \[1\] did not start within 3 s"):
            await ranks.supervisor.start()


@pytest.mark.parametrize("order", ["freeze", "hang"])
async def test_a_rank_that_does_not_end_is_killed_at_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_GRACE_S", 0.3)
    async with ranks_of(tmp_path, rank_entries.obedient) as ranks:
        await ranks.supervisor.start()
        pids = ranks.supervisor.pids
        ranks.supervisor.send(1, Order(what=order))
        ranks.supervisor.send(0, ECHO)
        await until(lambda: ranks.heard)
        await ranks.supervisor.stop(is_graceful=True)
        assert not any(is_alive(pid) for pid in pids)


async def test_a_rank_that_hangs_loses_the_life_and_an_idle_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "RANK_SILENCE_S", 5.0)
    monkeypatch.setattr(supervisor_module, "SILENCE_TICK_S", 0.1)
    async with ranks_of(tmp_path, rank_entries.obedient) as ranks:
        await ranks.supervisor.start()
        await asyncio.sleep(6.5)
        assert not ranks.lost, "nothing of the ranks has changed, and they have said so"
        time.sleep(5.5)  # blocks the loop: the leader itself stands still
        await asyncio.sleep(0.3)
        assert not ranks.lost, "it was the leader that stood still"
        ranks.supervisor.send(1, Order(what="block"))
        await until(lambda: ranks.lost)
        assert ranks.lost == ["rank 1 has not reported for 5 s"]


async def test_sigterm_to_every_process_of_the_node_is_the_leaders_to_answer(tmp_path: Path) -> None:
    async with ranks_of(tmp_path, rank_entries.obedient) as ranks:
        await ranks.supervisor.start()
        server = fork_server_pid()
        assert server is not None
        for pid in (*ranks.supervisor.pids, server):
            os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(0.3)
        ranks.supervisor.broadcast(ECHO)
        await until(lambda: len(ranks.heard) == 2 or ranks.lost)
        assert not ranks.lost and all(isinstance(message, Echo) for _, message in ranks.heard)
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "the leader itself still hears it"


@asynccontextmanager
async def leader_with_ranks(folder: Path, **environment: str) -> AsyncIterator[tuple[int, list[int]]]:
    """Start a leader with two ranks and yield their process ids. Kill the leader, and wait until its ranks have ended."""
    command = (sys.executable, "-m", "tests.runtime.leader_process", str(folder))
    leader = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=os.environ | environment)
    try:
        assert leader.stdout is not None
        async with asyncio.timeout(30):
            pids = [int(word) for word in (await leader.stdout.readline()).split()]
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
        yield leader.pid, pids
    finally:
        leader.kill()
        await leader.wait()
    await until(lambda: not any(is_alive(pid) for pid in pids))


async def test_ranks_end_with_their_leader(tmp_path: Path) -> None:
    async with leader_with_ranks(tmp_path):
        pass


async def test_leaders_share_a_fork_server_and_start_their_own_if_it_has_ended(tmp_path: Path) -> None:
    """A rank has the standard output of its leader, ends with it, and leaves SIGTERM to it."""
    server = SharedForkServer(tmp_path, os.environ, ["tests.runtime.preloaded"])
    try:
        async with (
            leader_with_ranks(tmp_path, **server.variables) as (first, ranks),
            leader_with_ranks(tmp_path, **server.variables) as (second, others),
        ):
            assert set(children_of(server.pid)) == {*ranks, *others}
            for leader, own in ((first, ranks), (second, others)):
                assert {os.readlink(f"/proc/{pid}/fd/1") for pid in own} == {os.readlink(f"/proc/{leader}/fd/1")}
            for pid in others:
                os.kill(pid, signal.SIGTERM)
            assert all(map(is_alive, others))
    finally:
        server.end()
    async with leader_with_ranks(tmp_path, **server.variables) as (leader, ranks):
        assert {parent_of(parent_of(rank)) for rank in ranks} == {leader}
