"""`kvferry doctor` on this machine: real transfers, and a torch in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from kvferry.doctor import command as doctor
from kvferry.doctor.devices import PeerAccess, look_at_peers
from kvferry.local_cluster.spec import child_environment


def test_this_machine_is_well_and_really_transfers() -> None:
    run = subprocess.run([sys.executable, "-m", "kvferry", "doctor", "--json"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads(run.stdout)
    found = {one["name"]: one for one in content["findings"]}
    assert content["ok"] is True
    assert "transfer over ucx" in found
    for transport in doctor.transports_here(doctor.installed_version, has_gpu=False):
        text = found[f"transfer over {transport}"]["text"]
        match = re.fullmatch(rf"(\d+\.\d\d) GB/s, [\d,]+ us, lane {transport}(?:/shm|/net)?, bytes equal", text)
        assert match and float(match[1]) > 0.05, text
    assert "tcp/lo" in found["ucx"]["text"]
    assert {"python", "packages", "shared memory", "cross-memory attach", "locked memory", "loopback ports", "gpu"} <= set(found)
    assert {"versions", "rdma", "clock"} <= set(found)


def test_without_a_transport_the_doctor_fails_and_prints_the_fix() -> None:
    environment = child_environment() | {"UCX_TLS": "nonsense"}
    run = subprocess.run([sys.executable, "-m", "kvferry", "doctor"], capture_output=True, text=True, timeout=60, env=environment)
    assert run.returncode == 1
    assert re.search(r"^fail (ucx|transfer over ucx):", run.stdout, re.MULTILINE)
    assert "fix:" in run.stdout


def test_the_look_at_peers_is_python_that_runs() -> None:
    """With torch as it is here, with or without GPUs."""
    assert isinstance(look_at_peers(), PeerAccess)
