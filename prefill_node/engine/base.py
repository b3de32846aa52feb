"""What any engine must give a prefill rank.

The setting `engine` names what loads it, as ``module:function``, called once in each rank's process:

    def load(config: PrefillNodeConfig, *, rank: int, rendezvous: Path) -> PrefillEngine

`config` is the node's settings (`transfer.config`), `rank` this process's place in the instance, from 0, and `rendezvous` the
path of a file that does not exist yet, at which the ranks of a group can meet; it is fresh in each life of the group. A
`TransferError` that the loader raises ends the node with its exit code and its one line. A whole engine with its loader:
docs/integration.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from transfer.engine_types import DeviceEvent, PrefillItem
from transfer.layout import KVLayout, Shard

if TYPE_CHECKING:
    from transfer.pool.kv_pool import KVPool

OnLayersWritten = Callable[[int, DeviceEvent | None], None]
"""``(layers_done, event)``: the KV of this step is in the pool for the first `layers_done` layers of the rank.

`event` is a recorded `torch.cuda.Event` behind which the pool may be read, or None where it may be read at once (CPU)."""


class PrefillEngine(Protocol):
    """One rank's engine on the prefill side: computes prompts into its paged pool, chunk by chunk.

    Driven by one thread. With tensor parallelism every rank is given the same steps in the same order.
    """

    @property
    def layout(self) -> KVLayout:
        """The KV of the whole model."""
        ...

    @property
    def shard(self) -> Shard:
        """This rank's cut of it."""
        ...

    @property
    def pool(self) -> KVPool:
        """Where this rank's KV lies; the engine never binds or frees a page, it uses those of the items."""
        ...

    @property
    def model_fields(self) -> Mapping[str, str]:
        """What must be equal on both sides besides the layout (architecture, rotary embedding, digest of the weights, ...)."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Positions that the model can be used with; prompt and generated tokens together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        ...

    def prefill(self, items: Sequence[PrefillItem], on_layers_written: OnLayersWritten | None = None) -> dict[str, int]:
        """Run one step over all items together.

        The leader goes by TP rank 0: there it may return only once every other rank has begun the step, as it does where a step
        has a collective. Where layers have sliding windows, a rank that fell further behind would be sent tokens for which it
        has no pages left (`transfer.layer_groups.PREFILL_STEPS_IN_FLIGHT`).

        Args:
            items: Any mix of requests, at most one item of each.
            on_layers_written: Called from inside the step, layer group by layer group, so that the first layers can travel
                while the last compute; the last call names all layers of the rank.

        Returns:
            request_id -> first token, for the items with `is_last`. On TP rank 0; empty on the others.

        Raises:
            RequestFault: Some requests of the step cannot go on; the others' tokens are in it, and the engine goes on.
            EngineError: An item does not fit the model or the pool (nothing was run), or the step failed, for example because
                another rank died (the engine is then of no more use).
        """
        ...

    # An engine may have one more method, without which `SwitchRole` is refused:
    #
    #     def switch_role(self, config: NodeConfig) -> PrefillEngine | DecodeEngine
    #
    # No step runs, and none comes before it returns. It gives back the pool and what hangs on it, and returns an engine of the
    # role of `config`, which may be itself, with the weights and the group that are there. Called on the thread that runs the
    # steps, in every rank. Where it raises a `TransferError`, or the change fails for another reason, it is called with the
    # former settings.

    def close(self) -> None:
        """Give back everything, leave the TP group. May be called twice."""
        ...
