"""Entry point of a decode rank's process, apart from the worker: the leader names it, and needs nothing of torch for that."""

from __future__ import annotations

from decode_node.rank_messages import CODEC
from node_runtime.rank_process import run_rank
from node_runtime.rank_worker import RankSpec


def run_decode_rank(spec: RankSpec) -> None:
    """Be one rank until the leader ends it or goes away."""
    from decode_node.worker import DecodeWorker

    run_rank(spec, CODEC, DecodeWorker)
