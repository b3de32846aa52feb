"""The interface of a prefill rank's engine. `node_runtime.engine` has the part that both roles need, and the loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from node_runtime.engine import PagedEngine
from transfer.engine_types import DeviceEvent, PrefillItem

OnLayersWritten = Callable[[int, DeviceEvent | None], None]
"""``(layers_done, event)``: the KV of this step is in the pool for the first `layers_done` layers of the rank.

`event` is a recorded `torch.cuda.Event` after which the pool may be read. None means that it may be read at once (CPU)."""


class PrefillEngine(PagedEngine, Protocol):
    """One rank's engine on the prefill side: computes prompts into its paged pool, chunk by chunk."""

    def prefill(self, items: Sequence[PrefillItem], on_layers_written: OnLayersWritten | None = None) -> dict[str, int]:
        """Run one step over all items together.

        The leader follows TP rank 0. There this may return only once every other rank has begun the step, as it does if a step
        has a collective. With sliding windows, a rank that fell further behind would receive tokens for which it has no pages
        left (`transfer.layer_groups.PREFILL_STEPS_IN_FLIGHT`).

        Args:
            items: Any mix of requests, at most one item of each.
            on_layers_written: Called from inside the step, layer group by layer group, so that the first layers can be sent
                while the last ones are computed. The last call names all layers of the rank.

        Returns:
            request_id -> first token, for the items with `is_last`. Empty on ranks other than TP rank 0.

        Raises:
            RequestFault: Some requests of the step cannot continue. It has the tokens of the others; the engine continues.
            EngineError: An item does not fit the model or the pool (nothing was computed), or the step failed, for example
                because another rank died. After a failed step the engine cannot be used any more.
        """
        ...
