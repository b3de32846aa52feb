"""What makes a node a prefill or a decode node, found by the role's name.

The packages of the two roles do not know each other, and this one knows neither. A node that changes its role, and each of its
ranks, so looks for the other one as for a plug-in: the module ``NAME_node.role`` has a `NodeRole` called ``ROLE``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from transfer.errors import ConfigError

if TYPE_CHECKING:
    from node_runtime.daemon import Daemon, SwitchableRole
    from node_runtime.rank_link import RankCodec
    from node_runtime.rank_worker import WorkerFactory

RoleName = Literal["prefill", "decode"]

ROLE_NAMES: Final[tuple[RoleName, ...]] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRole:
    """A role. Each `load_...` imports what it returns when it is called: a command line that is wrong needs none of it.

    Args:
        check_step_fits: Given the role's settings, raises ConfigError where a step can be larger than a message.
        load_codec: Returns the messages between leader and ranks.
        load_leader: Returns what makes the role's leader of daemon and settings.
        load_worker: Returns what makes the role's worker in a rank.
        rank_modules: Modules that a rank of the role needs from its start.
    """

    check_step_fits: Callable[[Any], None]
    load_codec: Callable[[], RankCodec]
    load_leader: Callable[[], Callable[[Daemon, Any], SwitchableRole]]
    load_worker: Callable[[], WorkerFactory]
    rank_modules: tuple[str, ...] = ()


def node_role(name: str) -> NodeRole:
    """The role of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in ROLE_NAMES:
        raise ConfigError(f"role is {name!r:.40}; it must be one of {', '.join(ROLE_NAMES)}")
    role = importlib.import_module(f"{name}_node.role").ROLE
    assert isinstance(role, NodeRole)
    return role
