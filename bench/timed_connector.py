"""The vLLM connector with a clock around each of its calls. vLLM loads it instead of `KvferryConnector`.

The clock stops during garbage collections, which are recorded separately for the whole process. A full collection scans the
engine core's heap for a third of a second here, inside any call.

Each role of a process writes its counts to its own file in `CONNECTOR_PROFILE_DIR`: during steps, at most once a second, and at
exit. A file with the ending `.live` always has the seconds in calls and those with a step (`LIVE`).
"""

from __future__ import annotations

import functools
import gc
import json
import mmap
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.scheduler import Scheduler

from bench.engine_servers import LIVE
from kvferry.engines.vllm_connector import KvferryConnector, KvferryMetadata

CALLS: Final = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "get_loaded_kv_cache_group_ids",
    "take_first_tokens",
    "handle_preemptions",
    "start_load_kv",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
)
WRITE_S: Final = 1.0


class Profile:
    """Seconds and number of calls by name, and the time with a step.

    A step has tokens. It begins when vLLM's scheduler schedules it, and ends when the scheduler has its results. With
    asynchronous scheduling, steps overlap; such time counts once. Only the scheduler's role counts it.
    """

    def __init__(self, role: str) -> None:
        self._calls: dict[str, list[float]] = {name: [0, 0.0, 0.0] for name in CALLS}  # number, seconds, longest
        self._num_steps = self._num_begun = 0
        self._busy_s = self._busy_since_s = self._call_s = self._waited_s = 0.0
        self._written_s = 0.0
        self._file = Path(os.environ["CONNECTOR_PROFILE_DIR"]) / f"{role}-{os.getpid()}.json"
        live = self._file.with_suffix(".live")
        live.write_bytes(bytes(LIVE.size))
        with live.open("r+b") as opened:
            self._live = mmap.mmap(opened.fileno(), LIVE.size)
        self._gc_s = [0, 0.0, 0.0]  # collections, seconds, longest
        self._gc_began_s = 0.0
        gc.callbacks.append(self._on_gc)

    @property
    def gc_s(self) -> float:
        """Seconds of garbage collections so far."""
        return self._gc_s[1]

    def _on_gc(self, phase: str, _: Mapping[str, int]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._gc_began_s = now_s
        else:
            took_s = now_s - self._gc_began_s
            self._gc_s = [self._gc_s[0] + 1, self._gc_s[1] + took_s, max(self._gc_s[2], took_s)]

    def called(self, name: str, seconds: float) -> None:
        entry = self._calls[name]
        entry[0] += 1
        entry[1] += seconds
        entry[2] = max(entry[2], seconds)
        self._call_s += seconds
        self._tell()

    def waited(self, seconds: float) -> None:
        """Count time in which an idle engine waited for a first token. It delays no step, so it is no call."""
        self._waited_s += seconds

    def step_begins(self, begun_s: float) -> None:
        if self._num_begun == 0:
            self._busy_since_s = begun_s
        self._num_begun += 1

    def step_ends(self) -> None:
        self._num_begun -= 1
        self._num_steps += 1
        now_s = time.perf_counter()
        self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s
        self._tell()

    def _tell(self) -> None:
        LIVE.pack_into(self._live, 0, self._call_s, self._busy_s)

    def write(self, *, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if not at_once and now_s - self._written_s < WRITE_S:
            return
        self._written_s = now_s
        found = {
            "steps": self._num_steps,
            "busy_s": self._busy_s,
            "call_s": self._call_s,
            "waited_s": self._waited_s,
            "garbage_collections": dict(zip(("number", "seconds", "longest_s"), self._gc_s, strict=True)),
            "calls": {
                name: {"number": int(n), "seconds": s, "longest_s": most} for name, (n, s, most) in self._calls.items() if n
            },
        }
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(found))
        fresh.replace(self._file)


def _timed(name: str) -> Callable[..., Any]:
    inner = getattr(KvferryConnector, name)

    @functools.wraps(inner)
    def timed(self: TimedConnector, *args: Any, **kwargs: Any) -> Any:
        began_s, collected_s = time.perf_counter(), self.profile.gc_s
        try:
            return inner(self, *args, **kwargs)
        finally:
            self.profile.called(name, time.perf_counter() - began_s - (self.profile.gc_s - collected_s))

    return timed


def _time_steps(profile: Profile) -> None:
    """Report the steps of vLLM's scheduler, and of the classes that are based on it."""
    schedule, update = Scheduler.schedule, Scheduler.update_from_output

    def timed_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun_s = time.perf_counter()
        output = schedule(self, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            profile.step_begins(begun_s)
        return output

    def timed_update(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return update(self, scheduler_output, *args, **kwargs)
        finally:
            if scheduler_output.total_num_scheduled_tokens:
                profile.step_ends()

    Scheduler.schedule, Scheduler.update_from_output = timed_schedule, timed_update


class TimedConnector(KvferryConnector):
    """See the module's docstring."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.profile = Profile(role.name.lower())
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            _time_steps(self.profile)

    def build_connector_meta(self, scheduler_output: Any) -> KvferryMetadata:
        metadata: KvferryMetadata = _build(self, scheduler_output)
        self.profile.write()
        return metadata

    def take_first_tokens(self, *, patience_s: float = 0.0) -> dict[str, int]:
        if not patience_s:
            taken: dict[str, int] = _take(self)
            return taken
        began_s = time.perf_counter()
        taken = super().take_first_tokens(patience_s=patience_s)
        self.profile.waited(time.perf_counter() - began_s)
        return taken

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.profile.write()

    def shutdown(self) -> None:
        super().shutdown()
        self.profile.write(at_once=True)


_build, _take = _timed("build_connector_meta"), _timed("take_first_tokens")
for _name in CALLS:
    if _name not in ("build_connector_meta", "take_first_tokens"):
        setattr(TimedConnector, _name, _timed(_name))
