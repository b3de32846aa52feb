"""The interface of a step's plan: KV writes, attention over the pool, and recurrent states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from embedded_engine.attention import Scores
from embedded_engine.latent_attention import LatentHeads

Advance = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(hidden [requests, tokens, dim], states [requests, heads, elements]) -> (output [requests, tokens, dim], states after it)."""


class StepPlan(Protocol):
    """The work of the layers in one step. Rows are the tokens of the step, in the order of its items."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Write this step's K and V of a layer into the pool, then attend.

        Args:
            layer: Global layer.
            query: [1, query heads, rows, dim], rotated.
            key, value: [1, KV heads, rows, dim], rotated.

        Returns:
            [1, rows, query heads, dim].
        """
        ...

    def attend_latent(self, layer: int, query: Tensor, latents: Tensor, heads: LatentHeads, scores: Scores) -> Tensor:
        """Write this step's latents [rows, 1, latent dim] of an MLA layer into the pool, then attend; otherwise as `attend`."""
        ...

    def advance(self, layer: int, hidden: Tensor, advance: Advance) -> Tensor:
        """Advance a recurrent layer's states over this step's tokens, in the pool.

        Args:
            layer: Global layer.
            hidden: [1, rows, dim].
            advance: The layer.

        Returns:
            [1, rows, dim] of its output.
        """
        ...
