"""The digest of a grant's payload: what the writer announces and the reader checks."""

from __future__ import annotations

import sys
from typing import Any

import xxhash

from transfer.errors import LocalProtocolError

DIGEST_ALGORITHM = "xxh3-64"
"""Name of the algorithm; negotiated at attach, both sides must use the same."""


def digest(payload: Any) -> int:
    """64-bit digest of bytes and their places.

    Copies nothing and releases the GIL for large payloads (xxhash does; seen with a spinning thread beside it).

    Args:
        payload: Contiguous bytes in host memory: bytes, memoryview, NumPy array, or torch CPU tensor, of any dtype.

    Returns:
        An integer in [0, 2**64).

    Raises:
        LocalProtocolError: The payload is on a device, or not contiguous.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(payload, torch.Tensor):
        if payload.device.type != "cpu" or not payload.is_contiguous():
            raise LocalProtocolError(
                f"digest of a tensor on {payload.device} with stride {payload.stride()}; it must be contiguous and on cpu"
            )
        # Through uint8, because NumPy knows no bfloat16 or float8.
        payload = payload.detach().reshape(-1).view(torch.uint8).numpy()
    view = memoryview(payload)
    if not view.c_contiguous:
        raise LocalProtocolError(f"digest of a buffer of shape {view.shape} and strides {view.strides}; it must be contiguous")
    return xxhash.xxh3_64_intdigest(view)
