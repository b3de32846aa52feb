"""The receiving end of writes that a cut network stops in the middle, in a network namespace: what is left once it is closed.

``python -m tests.cluster.links.cut_receive WRITER_NAMESPACE DEVICE``; prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np

from tests.transport.payload import rng
from tests.transport.remote_peer import RemotePeer
from transfer.transport.ucx import UcxTransport

PIECE = 3 << 20
NUM = 12
ROUNDS = 4  # what the cut meets depends on the moment; a receive that has begun, about every other time
PIPES = 3  # to the peer
CUT = 'table inet cut {\nchain out {\ntype filter hook output priority 0;\noifname "%s" drop\n}\n}\n'


def main(writer: str, device: str) -> None:
    environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": device, "UCX_LOG_LEVEL": "fatal"}
    os.environ.update(environment)
    transport = UcxTransport(lane="net")
    array = np.full(NUM * PIECE, 0x44, dtype=np.uint8)
    memory = transport.register(array)
    idle, whole = 0, 0
    for _ in range(ROUNDS):
        array[:] = 0x44
        peer = RemotePeer("net", "writer", NUM * PIECE, environment, prefix=("ip", "netns", "exec", writer))
        idle = idle or len(os.listdir("/proc/self/fd")) - PIPES
        session, answer = transport.accept(bytes.fromhex(peer.do("offer")), memory)
        peer.do("complete", answer=answer.hex())
        peer.do("fill", seed=1)
        for key in range(NUM):
            session.expect(memory, rng(key * PIECE, (key + 1) * PIECE), key)
            peer.start("write", begin=key * PIECE, end=(key + 1) * PIECE, target_begin=key * PIECE, key=key)
        while (array[:4096] == 0x44).all():
            session.progress()
        subprocess.run(["nft", "-f", "-"], input=CUT % device, text=True, check=True)
        ends_s = time.monotonic() + 1.0
        while time.monotonic() < ends_s:
            session.progress()
        session.close()
        peer.process.kill()
        peer.process.communicate()
        subprocess.run(["nft", "flush", "ruleset"], check=True)
        whole += bool((array[-4096:] != 0x44).any())
    print(json.dumps({"idle": idle, "left": len(os.listdir("/proc/self/fd")), "whole": whole}))


if __name__ == "__main__":
    main(*sys.argv[1:])
