"""This process's end of a session over UCX or NIXL, and the other end in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.transport.payload import PATTERN, noise, ring_of, rng
from tests.transport.remote_peer import RemotePeer
from transfer.errors import WriteFailed
from transfer.transport.base import Session
from transfer.transport.nixl import NixlTransport
from transfer.transport.ucx import UcxTransport

SEED = 3


class Ends:
    """A session; `here` says which end this process has. The writer's memory holds the noise of `SEED`.

    Args:
        kind: Transport and lane: "ucx-shm", "nixl-net".
        here: "writer" or "target".
        num_bytes: Bytes of the memory at either end.
        environment: Further variables of the other process.
    """

    def __init__(self, kind: str, here: str, num_bytes: int, environment: dict[str, str] | None = None) -> None:
        name, lane = kind.split("-")
        made: Any = UcxTransport if name == "ucx" else NixlTransport
        self.transport: Any = made(lane=lane)
        self.is_one_sided: bool = self.transport.is_one_sided
        self.num_bytes = num_bytes
        self.array = ring_of(num_bytes)
        self.memory = self.transport.register(self.array)
        self.here = here
        peer_lane = lane if name == "ucx" else kind
        self.peer = RemotePeer(peer_lane, "target" if here == "writer" else "writer", num_bytes, environment)
        if here == "writer":
            self.array[:] = noise(num_bytes, SEED)
        else:
            self.peer.do("fill", seed=SEED)
        self.session = self.open()

    def open(self) -> Session:
        session: Session
        if self.here == "writer":
            offer = self.transport.offer()
            session = offer.complete(bytes.fromhex(self.peer.do("accept", offer=offer.blob.hex())))
            return session
        session, answer = self.transport.accept(bytes.fromhex(self.peer.do("offer")), self.memory)
        self.peer.do("complete", answer=answer.hex())
        return session

    def open_again(self) -> None:
        """Close the session at both ends, and open another one. This end is the target."""
        self.peer.do("close")
        self.session.close()
        assert self.is_over()
        self.array[:] = PATTERN
        self.peer.do("new_offer")
        self.session = self.open()

    def drive(self, *handles: Any) -> None:
        self.until(lambda: all([handle.poll() for handle in handles]))

    def until(self, is_so: Callable[[], bool], within_s: float = 60.0) -> None:
        ends_at = time.monotonic() + within_s
        while not is_so():
            self.session.progress()
            assert time.monotonic() < ends_at, "still pending"

    def progress_for(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            self.session.progress()

    def expect(self, begin: int, end: int, key: int) -> list[Any]:
        """The handle of a receive, where the transport has those."""
        return [] if self.is_one_sided else [self.session.expect(self.memory, rng(begin, end), key)]

    def receive(self, begin: int, end: int, key: int) -> None:
        """A whole write of the peer's."""
        handles = self.expect(begin, end, key)
        self.peer.do("write", begin=begin, end=end, target_begin=begin, key=key)
        self.drive(*handles)
        assert self.peer.do("wait", keys=[key], deadline_s=60) == [end - begin]

    def send(self, begin: int, end: int, key: int) -> None:
        """A whole write to the peer."""
        if not self.is_one_sided:
            self.peer.do("expect", begin=begin, end=end, key=key)
        self.drive(self.session.write(self.memory, rng(begin, end), rng(begin, end), key))

    def settles(self, handle: Any) -> bool:
        """True when it settles well, False when it fails."""
        failed: list[bool] = []

        def is_settled() -> bool:
            try:
                return bool(handle.poll())
            except WriteFailed:
                failed.append(True)
                return True

        self.until(is_settled)
        return not failed

    def is_over(self, within_s: float = 60.0) -> bool:
        ends_at = time.monotonic() + within_s
        while not self.session.is_over and time.monotonic() < ends_at:
            time.sleep(0.001)
        return self.session.is_over

    def close(self) -> tuple[int, str]:
        self.transport.close()
        return self.peer.end()


def exchange(ends: Ends) -> None:
    """Move every byte of the target's memory, many writes in any order with some declined, and all of it in a new session."""
    wanted = noise(ends.num_bytes, SEED)
    ends.receive(0, ends.num_bytes, key=1)
    assert (ends.array == wanted).all()
    ends.array[:] = PATTERN
    size, first = 50_000, 100
    keys = [int(key) for key in np.random.default_rng(1).permutation(40)]
    declined = set() if ends.is_one_sided else set(range(0, 40, 3))
    handles = {key: ends.expect(key * size, (key + 1) * size, first + key) for key in keys[:20]}
    for key in range(40):
        if key in declined:
            ends.peer.do("decline", key=first + key)
        else:
            ends.peer.do("write", begin=key * size, end=(key + 1) * size, target_begin=key * size, key=first + key)
    ends.progress_for(0.02)
    handles |= {key: ends.expect(key * size, (key + 1) * size, first + key) for key in keys[20:]}
    ends.drive(*(handle for own in handles.values() for handle in own))
    sizes = [0 if key in declined else size for key in range(40)]
    assert ends.peer.do("wait", keys=[first + key for key in range(40)], deadline_s=60) == sizes
    for key in range(40):
        place = slice(key * size, (key + 1) * size)
        assert (ends.array[place] == (PATTERN if key in declined else wanted[place])).all(), key
        assert [handle.num_bytes for handle in handles[key]] == [sizes[key]] * (not ends.is_one_sided)
    assert (ends.array[40 * size :] == PATTERN).all()
    ends.open_again()
    ends.receive(0, ends.num_bytes, key=1)
    assert (ends.array == wanted).all()
