"""``kvferry-words-64`` over wire bytes on a GPU, as a pass of its own."""

from __future__ import annotations

from torch import Tensor

from transfer.kernels.copier import WireMemory, wire_tensor
from transfer.kernels.reference import reference_words_sum


def add_words(digest: Tensor, wire: WireMemory, num_bytes: int) -> None:
    """Add what the first `num_bytes` bytes of a wire count to `digest`, int64 [1] on the wire's device."""
    total = reference_words_sum(wire_tensor(wire)[:num_bytes])
    digest += total - (1 << 64) if total >= 1 << 63 else total
