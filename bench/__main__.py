"""Run all benchmarks on CPUs and compare them with their targets.

    python -m bench [--json FILE] [--quick] [--only NAME ...]        (`make bench`)

Each benchmark runs in a separate process, one after the other, in about seven minutes in total. ``python -m bench.NAME`` runs
one and prints its own table. The exit code is 1 if a target is missed or a benchmark fails. ``--quick`` checks no target. Two
targets are for one CPU model. On another CPU, a miss of these does not change the exit code, and the table names the model.
"""

from __future__ import annotations

import sys

from bench.suite import run_command
from bench.table import BUDGET_S, RUNS, outcomes_of

if __name__ == "__main__":
    sys.exit(run_command(RUNS, outcomes_of, title="kvferry: targets", budget_s=BUDGET_S))
