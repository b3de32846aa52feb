"""`kvferry doctor` on a machine with GPUs: torch's description of them, and bytes between two processes."""

from __future__ import annotations

import pytest
import torch

from kvferry.doctor import State, check_transfer
from kvferry.doctor_gpu import PeerAccess, check_peers, look_at_peers
from kvferry.loopback import measure_loopback

pytestmark = pytest.mark.gpu


def test_every_gpu_and_whom_it_reaches_is_known() -> None:
    found = look_at_peers()
    assert isinstance(found, PeerAccess), found
    count = torch.cuda.device_count()
    assert len(found.names) == len(found.reach) == count and all(found.reach[one][one] for one in range(count))
    assert found.names[0] in check_peers(found).text


def test_bytes_travel_between_two_processes_over_cuda_ipc() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    finding = check_transfer("cuda_ipc", measure_loopback)
    assert finding.state is State.OK, finding.text
    assert "lane cuda_ipc/fused" in finding.text
