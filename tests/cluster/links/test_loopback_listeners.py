"""On a loopback host the data plane opens no port that the network could reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node_runtime.rank_setup import is_loopback

ROOT = Path(__file__).resolve().parents[3]

LISTENERS = """
import json, os, sys
import numpy as np
from node_runtime.rank_setup import open_transport
from transfer.config import TransportConfig, UcxConfig
from transfer.transport.base import ByteRange

host, lane = sys.argv[1:]
config = TransportConfig(ucx=UcxConfig(lane=lane))
writer, target = open_transport(config, host=host), open_transport(config, host=host)
source, memory = writer.register(np.ones(4096, dtype=np.uint8)), target.register(buffer := np.zeros(4096, dtype=np.uint8))
offer = writer.offer()
session, answer = target.accept(offer.blob, memory)
write_end = offer.complete(answer)
whole = ByteRange(begin=0, end=4096)
arrival, write = session.expect(memory, whole, 1), write_end.write(source, whole, whole, 1)
while not (arrival.poll() and write.poll()):
    session.progress()
    write_end.progress()
own = set()
for name in os.listdir("/proc/self/fd"):
    try:
        own.add(os.readlink(f"/proc/self/fd/{name}"))
    except FileNotFoundError:
        pass
hosts = []
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            hosts.append(words[1].partition(":")[0])
print(json.dumps({"hosts": hosts, "lane": session.lane, "arrived": bool(buffer.all())}))
session.close()
write_end.close()
"""


@pytest.mark.parametrize("lane", ["shm", "net"])
def test_with_a_loopback_host_every_listener_is_on_loopback_and_bytes_arrive(lane: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"}
    command = [sys.executable, "-c", LISTENERS, "127.0.0.1", lane]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert found["lane"] == f"ucx/{lane}" and found["arrived"]
    assert found["hosts"] and set(found["hosts"]) == {"0100007F"}  # 127.0.0.1, as /proc/net/tcp has it


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("db.example", False),
    ],
)
def test_loopback_hosts(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local
