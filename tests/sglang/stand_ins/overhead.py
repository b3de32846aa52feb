"""How much of a scheduler's time goes into calls of kvferry; written to the file that OVERHEAD_FILE names, per process.

Counted are seconds of processor time of the scheduler's own thread, and calls: "steps" (the forward pass and what is done with
its result), "kvferry" (calls into kvferry's classes in rounds of the scheduler that had a step), and "idle" (those in rounds that
had none: a scheduler without work goes round and asks as often as it can).
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("__init__", "init", "send", "send_metadata", "poll", "abort", "clear", "failure_exception", "get_transfer_metric")
STEPS = ("run_batch", "process_batch_result")
REPORT_S = 0.5

seconds: dict[str, float] = {"kvferry": 0.0, "idle": 0.0, "round": 0.0, "steps": 0.0}
numbers: dict[str, int] = {"kvferry": 0, "idle": 0, "round": 0, "steps": 0}
_depth = threading.local()


def _counted(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if getattr(_depth, kind, False):
            return function(*args, **kwargs)
        setattr(_depth, kind, True)
        begin = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[kind] += time.thread_time() - begin
            numbers[kind] += 1
            setattr(_depth, kind, False)

    return wrapper


def watch_kvferry(module: Any) -> None:
    for owner in (module.KvferrySender, module.KvferryReceiver):
        for name in CALLS:
            if name in vars(owner):
                setattr(owner, name, _counted(vars(owner)[name], "round"))
    for name in ("made_sender", "made_receiver"):
        setattr(module, name, _counted(getattr(module, name), "round"))
    threading.Thread(target=_report, daemon=True).start()


def watch_scheduler(module: Any) -> None:
    for name in STEPS:
        setattr(module.Scheduler, name, _counted(getattr(module.Scheduler, name), "steps"))
    begin_round = module.Scheduler.ingest_requests
    num_steps = 0

    @functools.wraps(begin_round)
    def ingest_requests(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        kind = "idle" if numbers["steps"] == num_steps else "kvferry"
        num_steps = numbers["steps"]
        for counted in (seconds, numbers):
            counted[kind] += counted["round"]
            counted["round"] = 0
        return begin_round(*args, **kwargs)

    module.Scheduler.ingest_requests = ingest_requests


def _report() -> None:
    target = Path(f"{os.environ['OVERHEAD_FILE']}-{os.getpid()}.json")
    while True:
        time.sleep(REPORT_S)
        target.with_suffix(".new").write_text(json.dumps({"seconds": seconds, "numbers": numbers}), encoding="utf-8")
        target.with_suffix(".new").replace(target)
