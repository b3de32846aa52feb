"""Which modules a node's fork server imports, so that a rank starts in a fraction of a second."""

from __future__ import annotations

import importlib
from typing import Any

from node_runtime.node_role import node_role
from transfer.config import EMBEDDED_ENGINE, NodeConfig


def preloaded_modules(config: NodeConfig) -> tuple[str, ...]:
    """Names of the modules that the ranks of a node need: the engine's, then the role's.

    Those of an engine that is not ours are left to its ranks: they may start threads or open the GPU, which no fork survives.
    """
    role = node_role(config.role).rank_modules
    if config.engine != EMBEDDED_ENGINE:
        return role
    embedded: Any = importlib.import_module("embedded_engine.model_config")
    return (*embedded.modules_of(config.model, config.parallel.tp_size), *role)
