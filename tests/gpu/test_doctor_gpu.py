"""`kvferry doctor` on a machine with GPUs: bytes between two processes."""

from __future__ import annotations

import pytest

from kvferry.doctor.command import State, check_transfer
from kvferry.doctor.loopback import measure_loopback


def test_bytes_travel_between_two_processes_over_cuda_ipc() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    finding = check_transfer("cuda_ipc", measure_loopback)
    assert finding.state is State.OK, finding.text
    assert "lane cuda_ipc/fused" in finding.text
