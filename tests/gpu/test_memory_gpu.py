"""Waiting for a process's devices on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import torch
from transfer.transport.registered_memory import wait_for_devices
count = torch.cuda.device_count()
wait_for_devices()
assert not any(torch._C._cuda_hasPrimaryContext(device) for device in range(count)), "a context that nobody needs"
product = torch.ones(4096, 4096, device="cuda") @ torch.ones(4096, 4096, device="cuda")
event = torch.cuda.Event()
event.record()
wait_for_devices()
assert event.query()
assert [torch._C._cuda_hasPrimaryContext(device) for device in range(count)] == [True] + [False] * (count - 1)
"""


def test_a_device_that_is_not_used_gets_no_context() -> None:
    """It would cost hundreds of MiB of each GPU of the host, in each of its processes."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
