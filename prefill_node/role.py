"""The prefill role, for whoever looks for it by name: see `node_runtime.node_role`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from node_runtime.node_role import NodeRole
from prefill_node.rank_messages import CODEC, check_step_fits

if TYPE_CHECKING:
    from prefill_node.node import PrefillNode
    from prefill_node.worker import PrefillWorker


def load_leader() -> type[PrefillNode]:
    from prefill_node.node import PrefillNode

    return PrefillNode


def load_worker() -> type[PrefillWorker]:
    from prefill_node.worker import PrefillWorker

    return PrefillWorker


ROLE = NodeRole(codec=CODEC, check_step_fits=check_step_fits, load_leader=load_leader, load_worker=load_worker)
