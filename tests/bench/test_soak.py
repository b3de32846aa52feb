"""The soak reports wrong tokens, ends that nothing explains, hung requests and memory that grows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from bench.soak import GROWN_AT_LEAST_BYTES, Look, Watched
from bench.soak_traffic import MAX_WORDS, Plan, Prompt, Tally, Traffic, make_texts
from transfer.errors import (
    EngineError,
    IntegrityError,
    PeerUnreachable,
    StagingError,
    TransferAborted,
    TransferError,
    TransportTimeout,
)

PROMPT = Prompt(text="a b", num_tokens=2, expected=(5, 6, 7))


def make_traffic(*, may_be_unreachable: Callable[[float], bool] = lambda _: False) -> Traffic:
    return Traffic("127.0.0.1:1", [PROMPT], num_clients=1, seed=1, may_be_unreachable=may_be_unreachable)


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
        (Plan.STAYS, PeerUnreachable("gone"), "failed without a fault"),
        (Plan.STAYS, StagingError("no room"), "failed without a fault"),
        (Plan.LEAVES, IntegrityError("broken"), "failed without a fault"),
        (Plan.STAYS, EngineError("a bug"), "failed without a fault"),
    ],
)
def test_an_end_that_nothing_explains_is_a_violation(plan: Plan, error: TransferError, end: str) -> None:
    traffic = make_traffic()
    assert traffic.judge_failure(plan, error, time.monotonic(), 60.0, "id") == end
    assert traffic.tally.num_violations == (end in ("hung", "failed without a fault"))


def test_unavailable_is_explained_by_a_fault_and_nothing_else_is() -> None:
    asked: list[float] = []
    traffic = make_traffic(may_be_unreachable=lambda began_s: asked.append(began_s) is None)
    assert traffic.judge_failure(Plan.STAYS, PeerUnreachable("gone"), 17.0, 60.0, "id") == "unavailable"
    assert asked == [17.0]
    assert traffic.judge_failure(Plan.STAYS, EngineError("a bug"), 17.0, 60.0, "id") == "failed without a fault"


def test_many_violations_are_counted_and_few_are_told() -> None:
    tally = Tally()
    for number in range(50):
        tally.violate(f"{number}")
    assert (tally.num_violations, len(tally.violations)) == (50, 20)


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


def test_texts_differ_are_of_all_lengths_and_come_again() -> None:
    texts = make_texts(40, 3)
    lengths = sorted(len(text.split()) - 1 for text in texts)
    assert len(set(texts)) == 40 and texts == make_texts(40, 3) != make_texts(40, 4)
    assert lengths[0] < 5 and lengths[-1] > MAX_WORDS / 2 and lengths[-1] <= MAX_WORDS
