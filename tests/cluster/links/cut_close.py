"""Sessions over a network that is cut and healed are closed at random moments by both ends, in a network namespace.

``python -m tests.cluster.links.cut_close WRITER_NAMESPACE DEVICE``; prints the longest time that `close()` took, in seconds.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

from tests.cluster.links.cut_receive import CUT
from tests.transport.payload import ring_of, rng
from tests.transport.remote_peer import RemotePeer
from transfer.transport.base import Session
from transfer.transport.ucx import UcxTransport

PIECE = 4 << 20
NUM = 8
SECONDS = 25.0  # without `UcxSession._discard_arrived`, a `close()` did not end after 2 to 35 s, typically 12 s


class Rounds:
    """One session after the other with one writer.

    Args:
        writer: Namespace of the writer.
        device: The link between the two.
    """

    def __init__(self, writer: str, device: str) -> None:
        environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": device, "UCX_LOG_LEVEL": "fatal"}
        os.environ.update(environment)
        self._hosts: tuple[tuple[str, ...], ...] = ((), ("ip", "netns", "exec", writer))
        self._device = device
        self._transport = UcxTransport(lane="net")
        self._memory = self._transport.register(ring_of(NUM * PIECE))
        self._peer = RemotePeer("net", "writer", NUM * PIECE, environment, prefix=self._hosts[1])

    def run(self) -> float:
        """Return the longest time of a `close()`."""
        longest_s, ends_s = 0.0, time.monotonic() + SECONDS
        while time.monotonic() < ends_s:
            longest_s = max(longest_s, self._round())
            self._peer.do("new_offer")
        self._transport.close()
        self._peer.end()
        return longest_s

    def _round(self) -> float:
        peer, memory = self._peer, self._memory
        session, answer = self._transport.accept(bytes.fromhex(peer.do("offer")), memory)
        peer.do("complete", answer=answer.hex())
        is_cut_early, is_healed, closes_first = (random.random() < share for share in (0.3, 0.8, 0.6))
        if is_cut_early:
            self._cut()
        for key in range(NUM):
            session.expect(memory, rng(key * PIECE, (key + 1) * PIECE), key)
            peer.do("write", begin=key * PIECE, end=(key + 1) * PIECE, target_begin=key * PIECE, key=key)
        _progress(session, random.choice((0.0, 0.002, 0.01)))
        if not is_cut_early:
            self._cut()
        _progress(session, random.choice((0.05, 0.2, 0.5, 0.8)))
        if is_healed:
            self._heal()
        _progress(session, 0.5 * random.random())
        if closes_first:
            peer.start("close")
            time.sleep(random.choice((0.0, 0.001, 0.01, 0.05)))
        begin_s = time.monotonic()
        session.close()
        took_s = time.monotonic() - begin_s
        self._heal()
        if closes_first:
            peer.hear()
        else:
            peer.do("close")
        return took_s

    def _cut(self) -> None:
        for prefix in self._hosts:
            subprocess.run([*prefix, "nft", "-f", "-"], input=CUT % self._device, text=True, check=True)

    def _heal(self) -> None:
        for prefix in self._hosts:
            subprocess.run([*prefix, "nft", "flush", "ruleset"], check=True)


def _progress(session: Session, seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        session.progress()


if __name__ == "__main__":
    print(Rounds(*sys.argv[1:]).run())
