from __future__ import annotations

import numpy as np
import pytest
import torch

from transfer.errors import LocalProtocolError
from transfer.kernels.digest import DIGEST_XXH3, digest


def test_known_values_so_that_two_versions_agree() -> None:
    assert DIGEST_XXH3 == "xxh3-64"
    assert digest(b"") == 0x2D06800538D394C2
    assert digest(b"kvferry") == 0xC0EF06BFC9DA53BB


def test_the_same_bytes_in_any_buffer() -> None:
    raw = bytes(range(256)) * 3
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    expected = digest(raw)
    for payload in (
        memoryview(raw),
        bytearray(raw),
        np.frombuffer(raw, dtype=np.int16),
        values,
        values.view(torch.bfloat16),
        values.view(torch.float8_e4m3fn).view(3, 256),
    ):
        assert digest(payload) == expected


def test_bytes_and_places_matter() -> None:
    payload = torch.zeros(4096, dtype=torch.uint8)
    payload[1], zero = 1, digest(torch.zeros(4096, dtype=torch.uint8))
    first = digest(payload)
    assert len({first, zero, digest(payload.roll(1)), digest(payload[:4095])}) == 4


def test_only_contiguous_host_memory() -> None:
    for payload in (torch.zeros(8, 2, dtype=torch.uint8)[:, 0], torch.zeros(8, device="meta"), np.zeros((4, 4))[:, 1]):
        with pytest.raises(LocalProtocolError, match="contiguous"):
            digest(payload)
