"""List the modules that a node's fork server imports, so that a rank starts in a fraction of a second."""

from __future__ import annotations

import importlib
from typing import Any

from node_runtime.node_role import node_role
from transfer.config import EMBEDDED_ENGINE, NodeConfig


def preloaded_modules(config: NodeConfig) -> tuple[str, ...]:
    """Return the names of the modules that the ranks of a node need: first those of the engine, then those of the role.

    Modules of an external engine are not included. They may start threads or open the GPU, and a fork preserves neither.
    """
    role = node_role(config.role).rank_modules
    if config.engine != EMBEDDED_ENGINE:
        return role
    embedded: Any = importlib.import_module("embedded_engine.model_config")
    return (*embedded.modules_of(config.model, config.parallel.tp_size), *role)
