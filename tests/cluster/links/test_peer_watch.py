"""Watching real processes: alive, frozen, killed, zombies, and pids that were given away again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from transfer.errors import PeerUnreachable
from transfer.transport import liveness
from transfer.transport.liveness import PeerWatch, start_time_of

Child = subprocess.Popen[bytes]


@pytest.fixture
def child() -> Iterator[Child]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def watch(process: Child) -> PeerWatch:
    start_time = start_time_of(process.pid)
    assert start_time is not None
    return PeerWatch(process.pid, start_time)


def is_gone_within(watched: PeerWatch, seconds: float) -> bool:
    ends_at = time.monotonic() + seconds
    while not watched.is_gone and time.monotonic() < ends_at:
        time.sleep(0.001)
    return watched.is_gone


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_frozen_process_is_not_gone(child: Child) -> None:
    watched = watch(child)
    assert not watched.is_gone
    child.send_signal(signal.SIGSTOP)
    assert not is_gone_within(watched, 0.3)
    child.send_signal(signal.SIGCONT)
    assert not watched.is_gone
    watched.close()


def test_a_killed_process_is_gone_though_nobody_reaped_it(child: Child) -> None:
    watched, start_time = watch(child), start_time_of(child.pid)
    assert start_time is not None
    child.send_signal(signal.SIGSTOP)
    child.kill()
    assert is_gone_within(watched, 60)
    assert start_time_of(child.pid) is not None  # a zombie: its pid is taken until we wait for it
    child.wait()
    assert start_time_of(child.pid) is None
    assert watched.is_gone and PeerWatch(child.pid, start_time).is_gone


def test_another_process_of_the_same_pid_is_not_taken_for_the_peer(child: Child) -> None:
    start_time = start_time_of(child.pid)
    assert start_time is not None
    before = num_descriptors()
    assert PeerWatch(child.pid, start_time - 1).is_gone
    assert num_descriptors() == before


def test_a_process_that_runs_and_cannot_be_seen_is_never_called_gone(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    start_time = start_time_of(child.pid)
    assert start_time is not None
    before = num_descriptors()
    monkeypatch.setattr(liveness, "start_time_of", lambda pid: None)  # as under hidepid=2
    with pytest.raises(PeerUnreachable, match=f"/proc/{child.pid}/stat cannot be read"):
        PeerWatch(child.pid, start_time)
    assert num_descriptors() == before


@pytest.mark.parametrize("name", [b"a) R 1 (b", b"x\xff) \xfe"])
def test_start_time_behind_any_name(name: bytes) -> None:
    """A process may call itself anything, also what looks like fields; and the kernel cuts a name in the middle of a letter."""
    rename = f"import ctypes; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        assert name in Path(f"/proc/{process.pid}/stat").read_bytes()
        start_time, own = start_time_of(process.pid), start_time_of(os.getpid())
        assert start_time is not None and own is not None and start_time >= own
        assert not PeerWatch(process.pid, start_time).is_gone
    finally:
        process.kill()
        process.communicate()
