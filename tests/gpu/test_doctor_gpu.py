"""`kvferry doctor` on a machine with GPUs: what torch says of them is understood."""

from __future__ import annotations

import pytest
import torch

from kvferry.doctor_gpu import PeerAccess, check_peers, look_at_peers

pytestmark = pytest.mark.gpu


def test_every_gpu_and_whom_it_reaches_is_known() -> None:
    found = look_at_peers()
    assert isinstance(found, PeerAccess), found
    count = torch.cuda.device_count()
    assert len(found.names) == len(found.reach) == count and all(found.reach[one][one] for one in range(count))
    assert found.names[0] in check_peers(found).text
