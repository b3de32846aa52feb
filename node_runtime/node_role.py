"""Find the parts of a role by its name.

The packages of the two roles do not know each other, and this package knows neither. A role is a plug-in: its parts have fixed
places in the package ``prefill_node`` or ``decode_node``. They are imported when they are needed, because an invalid command line
needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from transfer.config import EMBEDDED_ENGINE, NodeConfig

if TYPE_CHECKING:
    from node_runtime.daemon import Daemon, RoleServer
    from node_runtime.rank_link import RankCodec
    from node_runtime.rank_worker import WorkerFactory

ROLE_NAMES: Final = ("prefill", "decode")


def check_step_fits(config: NodeConfig) -> None:
    """Raise ConfigError if a step of the role can be larger than a message to its ranks."""
    _part(config.role, "rank_messages", "check_step_fits")(config)


def make_leader(daemon: Daemon, config: NodeConfig) -> RoleServer:
    """Return the leader of the role that the settings are for."""
    leader: RoleServer = _part(config.role, "node", f"{config.role.capitalize()}Node")(daemon, config)
    return leader


def rank_parts(role: str) -> tuple[RankCodec, WorkerFactory]:
    """Return the messages between the leader and the ranks of a role, and its worker."""
    return _part(role, "rank_messages", "CODEC"), _part(role, "worker", f"{role.capitalize()}Worker")


def preloaded_modules(config: NodeConfig) -> tuple[str, ...]:
    """Return the names of the modules that the ranks of a node need: first those of the engine, then those of the role.

    The fork server imports them, so that a rank starts in a fraction of a second. Modules of an external engine are not included.
    They may start threads or open the GPU, and a fork preserves neither.
    """
    role = ("node_runtime.rank_process", f"{config.role}_node.worker")
    if config.engine != EMBEDDED_ENGINE:
        return role
    embedded: Any = importlib.import_module("embedded_engine.model_config")
    return (*embedded.modules_of(config.model, config.parallel.tp_size, config.draft_model), *role)


def _part(role: str, module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{role}_node.{module}"), name)
