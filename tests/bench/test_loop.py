"""`bench.loop` finds long turns, and its cases run to their end; here with small numbers, in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

from bench import loop, loop_cases, loop_many_requests
from bench.loop import Case
from bench.loop_models import layouts
from bench.loop_turns import Watch


def burn(seconds: float) -> Callable[[Watch], None]:
    def work() -> None:
        begun_s = time.thread_time()
        while time.thread_time() - begun_s < seconds:
            pass

    return lambda watch: watch.turn("work", work)


CASES: dict[str, Callable[[Watch], None]] = {
    "storm": lambda watch: loop_cases.storm_of_cancels(watch, is_one_sided=True, num_cancelled=2),
    "prompt": lambda watch: loop_cases.long_prompt(watch, layouts()["Gemma3ForCausalLM"], 2, 1, num_tokens=1500, is_whole=True),
    "nearly whole": lambda watch: loop_cases.nearly_whole(watch, num_requests=2, num_tokens=512),
    "lost": lambda watch: loop_cases.lost_decode_rank(watch, num_requests=2, num_tokens=1024),
    "collector": lambda watch: loop_cases.collector_pause(watch, num_requests=1, num_tokens=512),
    "grants": lambda watch: loop_cases.many_grants(watch, num_grants=40),
    "looks": lambda watch: loop_cases.dear_looks(watch, num_laps=9, num_chunks=8),
    "laps": lambda watch: loop_cases.dear_grants(watch, num_laps=9, num_chunks=8),
    "sessions": lambda watch: loop_cases.many_sessions(watch, num_sessions=3),
    "questions": lambda watch: loop_cases.repeated_questions(watch, num_chunks=4, num_messages=3),
    "chains": lambda watch: loop_cases.hash_chains(watch, num_tokens=64),
    "queue": lambda watch: loop_many_requests.prefill_queue(watch, num_requests=300, num_peers=4),
    "tables": lambda watch: loop_cases.step_tables(watch, num_requests=2, num_tokens=64),
}


@pytest.mark.parametrize("case", CASES)
def test_a_case_runs_to_its_end_and_has_turns(case: str) -> None:
    watch = Watch()
    CASES[case](watch)
    assert watch.num_turns and watch.worst.seconds > 0


@pytest.mark.parametrize(("option", "code"), [("--bound-ms=10", 1), ("--quick", 0), ("--only-measure", 0), ("--bound-ms=100", 0)])
def test_a_long_turn_is_the_exit_code(option: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "NUM_EMPTY_TURNS", 100)
    monkeypatch.setattr(loop, "cases", lambda: [Case(name="long", run=burn(0.02), is_quick=True)])
    monkeypatch.setattr(loop, "configure_logging", lambda *given, **named: None)
    monkeypatch.setattr(sys, "argv", ["bench.loop", "--bound-ms=10", option])
    with pytest.raises(SystemExit) as ended:
        loop.main()
    assert ended.value.code == code
