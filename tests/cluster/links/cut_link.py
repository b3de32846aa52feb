"""The receiving end of sessions over a network that is cut, in a network namespace.

``python -m tests.cluster.links.cut_link receive WRITER_NAMESPACE DEVICE`` cuts it in the middle of writes, and prints in JSON
what is left afterwards. ``... close WRITER_NAMESPACE DEVICE`` closes sessions at random moments of cuts, at both ends, and
prints the longest time of a `close()` in seconds.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time

import numpy as np

from tests.transport.payload import rng
from tests.transport.remote_peer import RemotePeer
from transfer.transport.base import Session
from transfer.transport.ucx import UcxTransport

RECEIVE_PIECE, RECEIVE_NUM = 3 << 20, 12
ROUNDS = 4  # what the cut meets depends on the moment; a receive that has begun, about every other time
CLOSE_PIECE, CLOSE_NUM = 4 << 20, 8
CLOSE_S = 25.0  # without `UcxSession._discard_arrived`, a `close()` did not end after 2 to 35 s, typically 12 s


class Link:
    """This end's transport and memory, and the link to the writer.

    Args:
        writer: Namespace of the writer.
        device: The link between the two.
    """

    def __init__(self, writer: str, device: str, piece: int, num: int) -> None:
        self._environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": device, "UCX_LOG_LEVEL": "fatal"}
        os.environ.update(self._environment)
        self.there = ("ip", "netns", "exec", writer)
        self.piece, self.num = piece, num
        self._rules = f'table inet cut {{\nchain out {{\ntype filter hook output priority 0;\noifname "{device}" drop\n}}\n}}\n'
        self.transport = UcxTransport(lane="net")
        self.array = np.full(num * piece, 0x44, dtype=np.uint8)
        self._memory = self.transport.register(self.array)

    def start_writer(self) -> RemotePeer:
        return RemotePeer("net", "writer", self.num * self.piece, self._environment, prefix=self.there)

    def open(self, peer: RemotePeer) -> Session:
        session, answer = self.transport.accept(bytes.fromhex(peer.do("offer")), self._memory)
        peer.do("complete", answer=answer.hex())
        return session

    def start_write(self, session: Session, peer: RemotePeer, key: int) -> None:
        begin, end = key * self.piece, (key + 1) * self.piece
        session.expect(self._memory, rng(begin, end), key)
        peer.start("write", begin=begin, end=end, target_begin=begin, key=key)

    def cut(self, *prefixes: tuple[str, ...]) -> None:
        for prefix in prefixes:
            subprocess.run([*prefix, "nft", "-f", "-"], input=self._rules, text=True, check=True)

    def heal(self, *prefixes: tuple[str, ...]) -> None:
        for prefix in prefixes:
            subprocess.run([*prefix, "nft", "flush", "ruleset"], check=True)


def progress(session: Session, seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        session.progress()


def receive(writer: str, device: str) -> None:
    link = Link(writer, device, RECEIVE_PIECE, RECEIVE_NUM)
    peer = link.start_writer()
    link.open(peer).close()
    peer.process.kill()
    peer.process.communicate()
    idle, whole = len(os.listdir("/proc/self/fd")), 0  # with those that UCX opens once
    for _ in range(ROUNDS):
        link.array[:] = 0x44
        peer = link.start_writer()
        session = link.open(peer)
        peer.do("fill", seed=1)
        for key in range(link.num):
            link.start_write(session, peer, key)
        while (link.array[:4096] == 0x44).all():
            session.progress()
        link.cut(())
        progress(session, 1.0)
        session.close()
        peer.process.kill()
        peer.process.communicate()
        link.heal(())
        whole += bool((link.array[-4096:] != 0x44).any())
    print(json.dumps({"left": (len(os.listdir("/proc/self/fd")) - idle) / ROUNDS, "whole": whole}))


def close(writer: str, device: str) -> None:
    link = Link(writer, device, CLOSE_PIECE, CLOSE_NUM)
    peer = link.start_writer()
    hosts = ((), link.there)
    longest_s, ends_s = 0.0, time.monotonic() + CLOSE_S
    while time.monotonic() < ends_s:
        session = link.open(peer)
        is_cut_early, is_healed, closes_first = (random.random() < share for share in (0.3, 0.8, 0.6))
        if is_cut_early:
            link.cut(*hosts)
        for key in range(link.num):
            link.start_write(session, peer, key)
            peer.hear()  # the peer reads one command at a time
        progress(session, random.choice((0.0, 0.002, 0.01)))
        if not is_cut_early:
            link.cut(*hosts)
        progress(session, random.choice((0.05, 0.2, 0.5, 0.8)))
        if is_healed:
            link.heal(*hosts)
        progress(session, 0.5 * random.random())
        if closes_first:
            peer.start("close")
            time.sleep(random.choice((0.0, 0.001, 0.01, 0.05)))
        begin_s = time.monotonic()
        session.close()
        longest_s = max(longest_s, time.monotonic() - begin_s)
        link.heal(*hosts)
        if closes_first:
            peer.hear()
        else:
            peer.do("close")
        peer.do("new_offer")
    link.transport.close()
    peer.end()
    print(longest_s)


if __name__ == "__main__":
    {"receive": receive, "close": close}[sys.argv[1]](*sys.argv[2:])
