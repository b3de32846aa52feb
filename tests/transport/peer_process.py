"""The other end of a UCX or NIXL session in a process of its own, told what to do by lines of JSON on stdin.

Run as ``python -m tests.transport.peer_process LANE ROLE NUM_BYTES``, LANE being ``shm`` of UCX or ``nixl-shm`` of NIXL; one JSON
line answers each command, and the next one must wait for it. Between commands it makes progress all the time, so that it can be
killed or stopped in the middle of a transfer.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
import time
from typing import Any

import msgpack

from tests.transport.payload import noise, ring_of, rng
from transfer.errors import TransferError
from transfer.transport.base import Session
from transfer.transport.ucx import UcxTransport


def _transport(lane: str) -> Any:
    if not lane.startswith("nixl-"):
        return UcxTransport(lane=lane)  # type: ignore[arg-type]
    from transfer.transport.nixl import NixlTransport

    return NixlTransport(lane=lane.removeprefix("nixl-"))  # type: ignore[arg-type]


class Peer:
    """Carries out commands; its memory is one array."""

    def __init__(self, lane: str, role: str, num_bytes: int) -> None:
        self.transport = _transport(lane)
        self.array = ring_of(num_bytes)
        self.memory = self.transport.register(self.array)
        self.offer = self.transport.offer() if role == "writer" else None
        self.session: Session | None = None
        self.handles: dict[int, Any] = {}
        self.answer: dict[str, Any] = {}

    def run(self, command: dict[str, Any]) -> Any:
        name, arguments = command.pop("do"), command
        return getattr(self, f"do_{name}")(**arguments)

    def do_offer(self) -> str:
        assert self.offer is not None
        return self.offer.blob.hex()

    def do_new_offer(self) -> None:
        self.offer = self.transport.offer()

    def do_complete(self, answer: str) -> str:
        assert self.offer is not None
        self.answer = msgpack.unpackb(msgpack.unpackb(bytes.fromhex(answer))[4])
        self.session = self.offer.complete(bytes.fromhex(answer))
        return self.session.lane

    def do_accept(self, offer: str) -> str:
        self.session, answer = self.transport.accept(bytes.fromhex(offer), self.memory)
        return answer.hex()

    def do_fill(self, seed: int) -> None:
        self.array[:] = noise(self.array.nbytes, seed)

    def do_is_noise(self, begin: int, end: int, seed: int, seed_begin: int) -> bool:
        wanted = noise(self.array.nbytes, seed)[seed_begin : seed_begin + end - begin]
        return bool((self.array[begin:end] == wanted).all())

    def do_write(self, begin: int, end: int, target_begin: int, key: int) -> None:
        assert self.session is not None
        target_range = rng(target_begin, target_begin + end - begin)
        self.handles[key] = self.session.write(self.memory, rng(begin, end), target_range, key)

    def do_write_many(self, places: list[list[int]]) -> None:
        """Write each (begin, end, key) to the same place."""
        for begin, end, key in places:
            self.do_write(begin, end, begin, key)

    def do_decline(self, key: int) -> None:
        assert self.session is not None
        self.handles[key] = self.session.decline(key)

    def do_expect(self, begin: int, end: int, key: int) -> None:
        assert self.session is not None
        self.handles[key] = self.session.expect(self.memory, rng(begin, end), key)

    def do_hammer(self, seconds: float) -> str:
        """Write to the memory that the answer named, past all rules and without looking; how that went in the end."""
        libc = ctypes.CDLL(None, use_errno=True)
        local = (ctypes.c_uint64 * 2)(self.array.ctypes.data, self.array.nbytes)
        remote = (ctypes.c_uint64 * 2)(self.answer["address"], self.array.nbytes)
        pid = self.answer["identity"][3]
        ends_at = time.monotonic() + seconds
        written = 0
        while time.monotonic() < ends_at:
            written = libc.process_vm_writev(pid, local, 1, remote, 1, 0)
        return "written" if written > 0 else os.strerror(ctypes.get_errno())

    def do_cpu_s(self, seconds: float) -> float:
        """CPU seconds of this process while it sleeps for `seconds`."""
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before

    def do_wait(self, keys: list[int], deadline_s: float) -> list[Any]:
        """What becomes of each key: bytes, an error's class name, or "pending"."""
        assert self.session is not None
        ends_at = time.monotonic() + deadline_s
        while True:
            outcomes = [self._outcome(key) for key in keys]
            if "pending" not in outcomes or time.monotonic() >= ends_at:
                return outcomes
            self.session.progress()

    def do_close(self) -> None:
        assert self.session is not None
        self.session.close()

    def _outcome(self, key: int) -> Any:
        handle = self.handles[key]
        try:
            return handle.num_bytes if handle.poll() else "pending"
        except TransferError as error:
            return type(error).__name__


def main() -> None:
    # UCX logs to standard output, in blocks that end in the middle of a line: an answer would be added to that line.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lane, role, num_bytes = sys.argv[1:]
    peer = Peer(lane, role, int(num_bytes))
    print(json.dumps("ready"), file=answers, flush=True)
    while True:
        while not select.select([sys.stdin], [], [], 0)[0]:
            if peer.session is None or not peer.session.progress():
                time.sleep(0.0002)
        line = sys.stdin.readline()
        if not line:
            break
        print(json.dumps(peer.run(json.loads(line))), file=answers, flush=True)
    peer.transport.close()


if __name__ == "__main__":
    main()
