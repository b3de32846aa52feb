"""The decode role, for whoever looks for it by name: see `node_runtime.node_role`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from node_runtime.node_role import NodeRole

if TYPE_CHECKING:
    from decode_node.node import DecodeNode
    from decode_node.worker import DecodeWorker
    from node_runtime.rank_link import RankCodec
    from transfer.config import DecodeNodeConfig


def check_step_fits(config: DecodeNodeConfig) -> None:
    from decode_node import rank_messages

    rank_messages.check_step_fits(config)


def load_codec() -> RankCodec:
    from decode_node.rank_messages import CODEC

    return CODEC


def load_leader() -> type[DecodeNode]:
    from decode_node.node import DecodeNode

    return DecodeNode


def load_worker() -> type[DecodeWorker]:
    from decode_node.worker import DecodeWorker

    return DecodeWorker


ROLE = NodeRole(
    check_step_fits=check_step_fits,
    load_codec=load_codec,
    load_leader=load_leader,
    load_worker=load_worker,
    rank_modules=("decode_node.rank", "decode_node.worker"),
)
