"""Life lines between real processes: letting go, dying, freezing, and children that outlive their parent."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from transfer.errors import PeerUnreachable
from transfer.transport.liveness import LivenessPipe, PeerPipe, PipeAddress

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


def is_over_within(line: PeerPipe, seconds: float) -> bool:
    ends_at = time.monotonic() + seconds
    while not line.is_over and time.monotonic() < ends_at:
        time.sleep(0.001)
    return line.is_over


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
        assert not is_over_within(line, 0.3)
        assert line.has_left
    finally:
        os.kill(child, signal.SIGKILL)
    assert is_over_within(line, 60)
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
