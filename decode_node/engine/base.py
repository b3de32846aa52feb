"""What any engine must give a decode rank.

The setting `engine` names what loads it, as ``module:function``, called once in each rank's process:

    def load(config: DecodeNodeConfig, *, rank: int, rendezvous: Path) -> DecodeEngine

`config` is the node's settings (`transfer.config`), `rank` this process's place in the instance, from 0, and `rendezvous` the
path of a file that does not exist yet, at which the ranks of a group can meet; it is fresh in each life of the group. A
`TransferError` that the loader raises ends the node with its exit code and its one line. A whole engine with its loader:
docs/integration.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from transfer.engine_types import DecodeItem
from transfer.layout import KVLayout, Shard

if TYPE_CHECKING:
    from transfer.pool.kv_pool import KVPool


class DecodeEngine(Protocol):
    """One rank's engine on the decode side: generates token by token from KV that lies in its paged pool.

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

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end a generation unless the request says otherwise."""
        ...

    def decode(self, items: Sequence[DecodeItem]) -> dict[str, int]:
        """Run one step: one token of every item goes in, the next one comes out.

        Args:
            items: Any mix of requests, at most one item of each; requests join and leave between steps.

        Returns:
            request_id -> next token. On TP rank 0; empty on the others.

        Raises:
            RequestFault: Some requests of the step cannot go on; the others' tokens are in it, and the engine goes on. Raised on
                TP rank 0, which has the tokens; of another rank nobody hears it.
            EngineError: An item does not fit the model or the pool (nothing was run), or the step failed, for example because
                another rank died (the engine is then of no more use).
        """
        ...

    # An engine may have two more methods. Without this one the setting `offload.device_window` is refused:
    #
    #     def use_host_pool(self, host: HostPool, *, block_bytes: int) -> None
    #
    # Called once, before the first step. From then on an item's `host_tables` can name pages of that `transfer.pool.host_pool`,
    # which hold what the item's page tables leave out. `block_bytes`: device memory that it may take to read them.

    # Without this one `SwitchRole` is refused:
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
