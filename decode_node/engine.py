"""The interface of a decode rank's engine. `node_runtime.engine` has the part that both roles need, and the loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from node_runtime.engine import PagedEngine
from transfer.engine_types import DecodeItem


class DecodeEngine(PagedEngine, Protocol):
    """One rank's engine on the decode side: generates token by token from the KV in its paged pool."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end a generation, unless the request ignores them."""
        ...

    def decode(self, items: Sequence[DecodeItem]) -> dict[str, int]:
        """Run one step: take one token of every item, and return the next one.

        Args:
            items: Any mix of requests, at most one item of each. Requests join and leave between steps.

        Returns:
            request_id -> next token. Empty on ranks other than TP rank 0.

        Raises:
            RequestFault: Some requests of the step cannot continue. It has the tokens of the others; the engine continues. Raised
                on TP rank 0, which has the tokens; nothing reads it from another rank.
            EngineError: An item does not fit the model or the pool (nothing was computed), or the step failed, for example
                because another rank died. After a failed step the engine cannot be used any more.
        """
        ...

    # An engine may have three more methods. Without `begin_decode`, each step waits for the tokens of the previous step:
    #
    #     def begin_decode(self, items: Sequence[DecodeItem]) -> Callable[[], dict[str, int]]
    #
    # It queues a step like `decode` of at least one item, and does not wait for the device. The node calls the returned function
    # once, on another thread and in the order of the steps. This function waits for the step, and returns or raises what `decode`
    # would. Before that call, at most one more step is queued. If `is_unread` of an item is true, the engine uses the token that
    # the previous step chose for that request. If the previous step chose no token for it, the engine may use any token, because
    # the result of the item is not used. If the method raises an EngineError, no work of this step runs on the device any more.
    # With `speculative.method`, or with pages in host memory or in the store while a request runs, the node calls `decode` or
    # `verify` instead.
    #
    # Without `verify`, the setting `speculative.method` is rejected:
    #
    #     def verify(self, items: Sequence[DecodeItem]) -> dict[str, Sequence[int]]
    #
    # It runs a step like `decode`, over the newest token of every item and its `draft_token_ids`, of which some items have none.
    # With the method draft_model, an item has `num_draft_tokens` instead, and the engine finds them.
    # It returns request_id -> the accepted draft tokens and the token behind them, at least one token. A draft token is accepted
    # if it is the token that `decode` would have returned at its place, and all before it are accepted.
    #
    # Without this one, the setting `offload.device_window` is refused:
    #
    #     def use_host_pool(self, host: HostPool, *, block_bytes: int) -> None
    #
    # It is called once, before the first step. From then on, `host_tables` of an item can name pages of that
    # `transfer.pool.host_pool` that the item's page tables leave out. `block_bytes` is device memory that the engine may use to
    # read them.
    #
    # If the engine has `can_read_store = True`, and the node has a store, the method gets one more argument, `stored: StoredKV`
    # of `transfer.engine_types`. Then `stored_blocks` of an item can name blocks that the engine reads there.
