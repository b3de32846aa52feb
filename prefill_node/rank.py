"""Entry point of a prefill rank's process, apart from the worker: the leader names it, and needs nothing of torch for that."""

from __future__ import annotations

from node_runtime.rank_process import run_rank
from node_runtime.rank_worker import RankSpec
from prefill_node.rank_messages import CODEC


def run_prefill_rank(spec: RankSpec) -> None:
    """Be one rank until the leader ends it or goes away."""
    from prefill_node.worker import PrefillWorker

    run_rank(spec, CODEC, PrefillWorker)
