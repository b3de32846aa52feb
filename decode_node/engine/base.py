"""The interface of a decode rank's engine.

The setting `engine` names a loader as ``module:function``. Each rank's process calls it once:

    def load(config: DecodeNodeConfig, *, rank: int, rendezvous: Path) -> DecodeEngine

`rank` is the process's index in the instance. `rendezvous` is the path of a file that does not exist yet, at which the ranks of a
group can meet; each life of the group has a new one. A `TransferError` of the loader ends the node with its exit code and its
message. docs/integration.md shows a whole engine with its loader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from transfer.engine_types import DecodeItem
from transfer.layout import KVLayout, Shard

if TYPE_CHECKING:
    from transfer.pool.kv_pool import KVPool


class DecodeEngine(Protocol):
    """One rank's engine on the decode side, which generates token by token from KV in its paged pool.

    One thread calls it. With tensor parallelism, every rank gets the same steps in the same order.
    """

    @property
    def layout(self) -> KVLayout:
        """The KV of the whole model."""
        ...

    @property
    def shard(self) -> Shard:
        """This rank's part of that KV."""
        ...

    @property
    def pool(self) -> KVPool:
        """This rank's KV. The engine never binds or frees a page; it uses the pages of the items."""
        ...

    @property
    def model_fields(self) -> Mapping[str, str]:
        """Values that must be equal on both sides besides the layout: architecture, rotary embedding, digest of the weights."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of a request, prompt and generated tokens together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        ...

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end a generation, unless the request ignores them."""
        ...

    def decode(self, items: Sequence[DecodeItem]) -> dict[str, int]:
        """Run one step: take one token of every item, and return the next one.

        Args:
            items: Any mix of requests, at most one item of each. Requests join and leave between steps.

        Returns:
            The next token by request_id on TP rank 0; empty on the others.

        Raises:
            RequestFault: Some requests of the step cannot go on. It has the tokens of the others, and the engine goes on. Raise
                it on TP rank 0, which has the tokens; on another rank it has no effect.
            EngineError: An item does not fit the model or the pool (nothing was run), or the step failed, for example because
                another rank died (the engine is then useless).
        """
        ...

    # An engine may have two more methods. Without this one, the setting `offload.device_window` is rejected:
    #
    #     def use_host_pool(self, host: HostPool, *, block_bytes: int) -> None
    #
    # Called once, before the first step. From then on an item's `host_tables` can name pages of that `transfer.pool.host_pool`,
    # which hold the entries that its page tables leave out. `block_bytes` is device memory for reading them.

    # Without this one, `SwitchRole` is rejected:
    #
    #     def switch_role(self, config: NodeConfig) -> PrefillEngine | DecodeEngine
    #
    # Called in every rank, on the thread that runs the steps, while no step runs. It releases the pool and all that uses it, and
    # returns an engine of the role of `config`, which may be itself, with the present weights and group. If it raises a
    # `TransferError`, or the change fails for another reason, it is called with the former settings.

    def close(self) -> None:
        """Release everything, and leave the TP group. Idempotent."""
        ...
