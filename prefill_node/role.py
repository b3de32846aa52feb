"""The prefill role, for whoever looks for it by name: see `node_runtime.node_role`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from node_runtime.node_role import NodeRole

if TYPE_CHECKING:
    from node_runtime.rank_link import RankCodec
    from prefill_node.node import PrefillNode
    from prefill_node.worker import PrefillWorker
    from transfer.config import PrefillNodeConfig


def check_step_fits(config: PrefillNodeConfig) -> None:
    from prefill_node import rank_messages

    rank_messages.check_step_fits(config)


def load_codec() -> RankCodec:
    from prefill_node.rank_messages import CODEC

    return CODEC


def load_leader() -> type[PrefillNode]:
    from prefill_node.node import PrefillNode

    return PrefillNode


def load_worker() -> type[PrefillWorker]:
    from prefill_node.worker import PrefillWorker

    return PrefillWorker


ROLE = NodeRole(
    check_step_fits=check_step_fits,
    load_codec=load_codec,
    load_leader=load_leader,
    load_worker=load_worker,
    rank_modules=("prefill_node.rank", "prefill_node.worker"),
)
