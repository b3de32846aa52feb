"""Work that keeps a GPU busy."""

from __future__ import annotations

import torch


def occupy(cycles: int) -> None:
    """Let the current stream wait for so many cycles of the GPU; by what torch's own tests use, for want of a public function."""
    vars(torch.cuda)["_sleep"](cycles)
