"""Metrics of every process whose event loop carries sessions: ranks, and the leader, whose series have no label ``rank``."""

from __future__ import annotations

from typing import Final

from transfer.metrics.specs import declare

TURN_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Ordinary turns take less than the first bound. 0.05 is the bound of ``bench.loop``, 0.25 that of the warning and the alert."""

LOOP_METRICS: Final = (
    declare(
        "histogram",
        "loop_turn_seconds",
        "Wall-clock seconds of a turn of the event loop, counted since the process was first ready. The loop sends and notices no"
        " heartbeat during a turn. An engine that hosts both sides in one process has one loop, which both roles report.",
        buckets=TURN_BUCKETS_S,
        advice="Turns above 0.25: loop_turn_long in the process's log names the longest event. See KvferryLoopTurnsLong in"
        " docs/runbooks.md.",
    ),
)
