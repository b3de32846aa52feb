"""Liveness of real processes: alive, letting go, frozen, killed, zombies, children that outlive them, reused pids."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from transfer.errors import PeerUnreachable
from transfer.transport import liveness
from transfer.transport.liveness import LivenessPipe, PeerPipe, PeerWatch, PipeAddress, start_time_of

Child = subprocess.Popen[bytes]
ROOT = Path(__file__).resolve().parents[3]

# Prints its line's address; "end" lets go, "fork" leaves a child behind that sleeps, anything else ends it.
_CHILD = """
import json, os, sys, time
from transfer.transport.liveness import LivenessPipe
line = LivenessPipe()
print(json.dumps(line.address.to_wire()), flush=True)
for command in sys.stdin:
    if command.strip() == "end":
        line.end()
        print("{}", flush=True)
    elif command.strip() == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
    elif command.strip() == "end in a child":
        child = os.fork()
        if child == 0:
            line.end()
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
    else:
        break
"""


class Peer:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = PipeAddress.from_wire(self.hear())

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.hear()

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def peer() -> Iterator[Peer]:
    found = Peer()
    yield found
    found.stop()


def becomes(holds: Callable[[], bool], within_s: float) -> bool:
    ends_at = time.monotonic() + within_s
    while not holds() and time.monotonic() < ends_at:
        time.sleep(0.001)
    return holds()


def num_descriptors() -> int:
    gc.collect()  # else one that an earlier test left behind may go between two counts
    return len(os.listdir("/proc/self/fd"))


def test_a_forked_child_holds_the_end_up(peer: Peer) -> None:
    """It holds its parent's descriptors, the device's too, and with them work that the parent had queued."""
    line = PeerPipe(peer.address)
    child = peer.tell("fork")
    peer.process.kill()
    peer.process.wait()
    try:
        assert not becomes(lambda: line.is_over, 0.3)
        assert line.has_left
    finally:
        os.kill(child, signal.SIGKILL)
    assert becomes(lambda: line.is_over, 60)
    line.close()


def test_a_forked_child_does_not_speak_for_its_parent(peer: Peer) -> None:
    """It may end what it inherited, at exit for one; its parent still writes."""
    line = PeerPipe(peer.address)
    assert peer.tell("end in a child") == 0
    assert not line.has_left and not line.is_over
    peer.tell("end")
    assert line.is_over
    line.close()


def test_a_peer_elsewhere_is_refused(peer: Peer) -> None:
    for identity in (
        replace(peer.address.identity, boot_id="another", host="far"),
        replace(peer.address.identity, pid_namespace=1),
    ):
        with pytest.raises(PeerUnreachable, match=r"pid namespace \(docker --pid=host.*choose transport: ucx or nixl"):
            PeerPipe(replace(peer.address, identity=identity))


def test_a_process_of_another_user_is_refused() -> None:
    own = LivenessPipe()
    code = (
        "import os, sys, json\n"
        "from transfer.transport.liveness import PipeAddress, PeerPipe\n"
        "os.setuid(65534)\n"
        "try: PeerPipe(PipeAddress.from_wire(json.loads(sys.argv[1])))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    argument = json.dumps(own.address.to_wire())
    done = subprocess.run([sys.executable, "-c", code, argument], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("PeerUnreachable descriptors of peer process"), done
    assert "run both ends as the same user" in done.stdout
    own.end()


# The watch on a process alone


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


def test_a_frozen_process_is_not_gone(child: Child) -> None:
    watched = watch(child)
    assert not watched.is_gone
    child.send_signal(signal.SIGSTOP)
    assert not becomes(lambda: watched.is_gone, 0.3)
    child.send_signal(signal.SIGCONT)
    assert not watched.is_gone
    watched.close()


def test_a_killed_process_is_gone_before_it_is_reaped(child: Child) -> None:
    watched, start_time = watch(child), start_time_of(child.pid)
    assert start_time is not None
    child.send_signal(signal.SIGSTOP)
    child.kill()
    assert becomes(lambda: watched.is_gone, 60)
    assert start_time_of(child.pid) is not None  # a zombie: its pid is taken until we wait for it
    child.wait()
    assert start_time_of(child.pid) is None
    assert watched.is_gone and PeerWatch(child.pid, start_time).is_gone


def test_another_process_of_the_same_pid_is_not_taken_for_the_peer(child: Child) -> None:
    start_time = start_time_of(child.pid)
    assert start_time is not None
    before = num_descriptors()
    assert PeerWatch(child.pid, start_time - 1).is_gone
    assert num_descriptors() <= before, "fewer if the collector has closed those of a test before"


def test_a_process_that_runs_and_cannot_be_seen_is_never_called_gone(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    start_time = start_time_of(child.pid)
    assert start_time is not None
    before = num_descriptors()
    monkeypatch.setattr(liveness, "start_time_of", lambda pid: None)  # as under hidepid=2
    with pytest.raises(PeerUnreachable, match=f"/proc/{child.pid}/stat cannot be read"):
        PeerWatch(child.pid, start_time)
    assert num_descriptors() <= before


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
