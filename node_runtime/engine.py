"""The interface of an engine that both roles need, and its loader.

The setting `engine` names the loader as ``module:function``. It is called once in each rank's process:

    def load(config: NodeConfig, *, rank: int, rendezvous: Path) -> PrefillEngine | DecodeEngine

`config` has the settings of the node, and `rank` is the index of the process in the instance. `rendezvous` is the path of a file
that does not exist yet, at which the ranks of a group can meet. It is new in each life of the group. A `TransferError` of the
loader ends the node with its exit code and its one line. docs/integration.md has a whole engine with its loader.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from transfer.config import NodeConfig
from transfer.errors import ConfigError
from transfer.layout import KVLayout, Shard

if TYPE_CHECKING:
    from transfer.pool.kv_pool import KVPool


class InstanceEngine(Protocol):
    """The part of an engine that describes its instance to peers."""

    @property
    def layout(self) -> KVLayout:
        """The KV of the whole model."""
        ...

    @property
    def shard(self) -> Shard:
        """This rank's shard of it."""
        ...

    @property
    def model_fields(self) -> Mapping[str, str]:
        """Further properties that must be equal on both sides: architecture, rotary embedding, digest of the weights, ..."""
        ...


class PagedEngine(InstanceEngine, Protocol):
    """One rank's engine. One thread calls it. With tensor parallelism every rank receives the same steps in the same order."""

    @property
    def pool(self) -> KVPool:
        """The pool of this rank's KV. The engine uses the pages of the items; it never binds or frees a page."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Maximum number of tokens of a prompt and its generation together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        ...

    # An engine may have one more method, without which `SwitchRole` is refused:
    #
    #     def switch_role(self, config: NodeConfig) -> PrefillEngine | DecodeEngine
    #
    # It frees the pool and everything that refers to it. It returns an engine for the role of `config`, with the same weights and
    # group; this may be the same object. It is called in every rank, on the thread that runs the steps; no step runs meanwhile.
    # If it raises a `TransferError`, or the change fails for another reason, it is called with the former settings.

    def close(self) -> None:
        """Free everything and leave the TP group. May be called twice."""
        ...


def engine_loader(config: NodeConfig) -> Callable[..., Any]:
    """Return the loader that the setting `engine` names.

    Raises:
        ConfigError: There is no such module or function.
    """
    module, _, function = config.engine.partition(":")
    try:
        loader: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine is {config.engine}, which cannot be imported: {error}") from error
    return loader
