"""The decode role, for whoever looks for it by name: see `node_runtime.node_role`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decode_node.rank_messages import CODEC, check_step_fits
from node_runtime.node_role import NodeRole

if TYPE_CHECKING:
    from decode_node.node import DecodeNode
    from decode_node.worker import DecodeWorker


def load_leader() -> type[DecodeNode]:
    from decode_node.node import DecodeNode

    return DecodeNode


def load_worker() -> type[DecodeWorker]:
    from decode_node.worker import DecodeWorker

    return DecodeWorker


ROLE = NodeRole(codec=CODEC, check_step_fits=check_step_fits, load_leader=load_leader, load_worker=load_worker)
