"""Runs the benchmarks of kvferry's promises, and says which of them hold on this machine.

    python -m bench [--json FILE] [--quick] [--only NAME ...]        (`make bench`)

Each benchmark runs in a process of its own, one after the other, in under six minutes together; its own table can be had with
``python -m bench.NAME``. Exit code 1 when a promise is missed or a benchmark fails; with ``--quick``, which is for seeing
that all of it runs, only when one fails.
"""

from __future__ import annotations

import sys

from bench.suite import run_suite
from bench.table import BUDGET_S, RUNS, outcomes_of

if __name__ == "__main__":
    sys.exit(run_suite(RUNS, outcomes_of, title="kvferry: what it must reach", budget_s=BUDGET_S))
