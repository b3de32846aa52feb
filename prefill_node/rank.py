"""Entry point of a prefill rank's process, apart from the worker: the leader names it, and needs nothing of torch for that."""

from __future__ import annotations

from node_runtime.rank_process import RankSpec, run_rank
from prefill_node.role import ROLE


def run_prefill_rank(spec: RankSpec) -> None:
    """Be one rank until the leader ends it or goes away."""
    run_rank(spec, ROLE.load_codec(), ROLE.load_worker())
