"""The soak reports wrong tokens, ends that nothing explains, hung requests and memory that grows."""

from __future__ import annotations

import random
import time

import pytest

from bench.soak import GROWN_AT_LEAST_BYTES, Look, Watched
from bench.soak_traffic import Plan, Prompt, Traffic
from transfer.errors import (
    EngineError,
    TransferAborted,
    TransferError,
    TransportTimeout,
)

PROMPT = Prompt(text="a b", num_tokens=2, expected=(5, 6, 7))


def make_traffic() -> Traffic:
    return Traffic("127.0.0.1:1", [PROMPT], num_clients=1, seed=1, may_be_unreachable=lambda began_s: False)


@pytest.mark.parametrize("tokens", [[5, 6, 8], [6], [5, 6, 7, 8]])
def test_wrong_tokens_are_seen(tokens: list[int]) -> None:
    traffic = make_traffic()
    traffic.judge_tokens(PROMPT, [5, 6], "right")
    assert traffic.tally.num_violations == 0
    traffic.judge_tokens(PROMPT, tokens, "wrong")
    assert traffic.tally.num_violations == 1 and str(tokens) in traffic.tally.violations[0]
    assert traffic.tally.num_tokens_verified == 2 + len(tokens)


@pytest.mark.parametrize(
    ("plan", "error", "end"),
    [
        (Plan.RUNS_OUT_OF_TIME, TransportTimeout("late"), "out of time"),
        (Plan.IS_ABORTED, TransferAborted("aborted"), "aborted"),
        (Plan.STAYS, TransportTimeout("late"), "hung"),
        (Plan.STAYS, TransferAborted("aborted"), "failed without a fault"),
        (Plan.STAYS, EngineError("a bug"), "failed without a fault"),
    ],
)
def test_an_end_that_nothing_explains_is_a_violation(plan: Plan, error: TransferError, end: str) -> None:
    traffic = make_traffic()
    assert traffic.judge_failure(plan, error, time.monotonic(), 60.0, "id") == end
    assert traffic.tally.num_violations == (end in ("hung", "failed without a fault"))


def test_a_process_that_grows_is_seen_and_one_that_warms_up_is_not() -> None:
    watched, chance = Watched(), random.Random(1)
    for minute in range(10):
        warm = 300 << 20 if minute else 200 << 20
        for name, rss in (
            ("warms", warm + chance.randrange(1 << 20)),
            ("grows", warm + minute * (3 << 20)),
            ("short", minute << 30),
        ):
            if name != "short" or minute < 2:
                watched.looks[name].append(Look(at_s=60.0 * minute, rss_bytes=rss, num_open_files=9))
    assert watched.growth().keys() == {"warms", "grows"}
    assert watched.growth()["grows"] == pytest.approx(3 << 20)
    (line,) = watched.grown()
    assert line == "grows grew by 3.0 MiB a minute" and GROWN_AT_LEAST_BYTES < 8 * (3 << 20)
