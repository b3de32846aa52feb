"""The demo with block-sparse prefill: settings of the prefill tier, and what it selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.demo.offload import Figures
from kvferry.demo.reference import ReferenceResult
from kvferry.local_cluster.cluster import LocalCluster

BLOCK_SIZE = 64
STRIDE = 8
"""Small values: the demo's longest prompts have about 600 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseReport:
    """Report on block-sparse prefill. ``--json`` has the same field names.

    Args:
        threshold: Value of `prefill.sparse_threshold`.
        density: Fraction of full attention's blocks that were attended to.
        same_tokens: Requests with exactly the tokens of full attention.
        similarity: Fraction of a request's tokens before the first that differs, mean over the requests.
    """

    threshold: float
    density: float
    same_tokens: int
    similarity: float

    @property
    def is_plausible(self) -> bool:
        """Whether blocks were counted, and with threshold 1 all were selected."""
        return self.density == 1 if self.is_exact else 0 < self.density <= 1

    @property
    def is_exact(self) -> bool:
        """Whether the tokens must be those of full attention."""
        return self.threshold == 1


def sparse_settings(threshold: float) -> dict[str, object]:
    """Return the settings of the prefill tier, by path."""
    return {
        "prefill.sparse_policy": "xattention",
        "prefill.sparse_block_size": BLOCK_SIZE,
        "prefill.sparse_stride": STRIDE,
        "prefill.sparse_threshold": threshold,
    }


async def prefill_density(cluster: LocalCluster) -> float:
    """Return the density from the prefill node's metrics."""
    prefill = Figures((await cluster.prefill.http("/metrics"))[1])
    selected, skipped = (prefill.sum("prefill_blocks_total", state=state) for state in ("selected", "skipped"))
    return selected / max(1, selected + skipped)


def sparse_report(
    outputs: Sequence[Sequence[int]], reference: Sequence[ReferenceResult | None], *, threshold: float, density: float
) -> SparseReport:
    """Compare the tokens of each request with those of full attention, in a single process."""
    shares = [
        _common(found, wanted.token_ids) / max(1, len(wanted.token_ids))
        for found, wanted in zip(outputs, reference, strict=True)
        if wanted is not None
    ]
    return SparseReport(
        threshold=threshold,
        density=density,
        same_tokens=sum(
            wanted is not None and list(found) == list(wanted.token_ids) for found, wanted in zip(outputs, reference, strict=True)
        ),
        similarity=sum(shares) / max(1, len(shares)),
    )


def _common(found: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning."""
    count = 0
    for one, other in zip(found, wanted, strict=False):
        if one != other:
            break
        count += 1
    return count
