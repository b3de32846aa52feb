"""The vLLM connector with a clock around each of its calls. vLLM loads it instead of `KvferryConnector`.

The clock stops during garbage collections, which are recorded separately for the whole process. A full collection scans the
engine core's heap for a third of a second here, inside any call.

Each role of a process writes its counts to its own file in `CONNECTOR_PROFILE_DIR`: during steps, at most five times a second,
and at exit.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvferry.engines.vllm_connector import KvferryConnector, KvferryMetadata

CALLS: Final = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "handle_preemptions",
    "start_load_kv",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
)
WRITE_S: Final = 0.2  # bench.engines reads the files between loads


class Profile:
    """Seconds and number of calls by name, and of steps that computed something."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._calls: dict[str, list[float]] = {name: [0, 0.0, 0.0] for name in CALLS}  # number, seconds, longest
        self._num_steps, self._step_s, self._call_s_in_steps = 0, 0.0, 0.0
        self._step_began_s: float | None = None
        self._call_s = 0.0
        self._written_s = 0.0
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

    def step_begins(self) -> None:
        self._step_began_s, self._call_s = time.perf_counter(), 0.0

    def step_ends(self, num_tokens: int) -> None:
        if self._step_began_s is not None and num_tokens:
            self._num_steps += 1
            self._step_s += time.perf_counter() - self._step_began_s
            self._call_s_in_steps += self._call_s
        self._step_began_s = None

    def write(self, *, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if not at_once and now_s - self._written_s < WRITE_S:
            return
        self._written_s = now_s
        found = {
            "role": self._role,
            "steps": self._num_steps,
            "step_s": self._step_s,
            "call_s_in_steps": self._call_s_in_steps,
            "garbage_collections": dict(zip(("number", "seconds", "longest_s"), self._gc_s, strict=True)),
            "calls": {
                name: {"number": int(n), "seconds": s, "longest_s": most} for name, (n, s, most) in self._calls.items() if n
            },
        }
        file = Path(os.environ["CONNECTOR_PROFILE_DIR"]) / f"{self._role}-{os.getpid()}.json"
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(found))
        fresh.replace(file)


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


class TimedConnector(KvferryConnector):
    """See the module's docstring."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.profile = Profile(role.name.lower())
        super().__init__(vllm_config, role, kv_cache_config)

    def build_connector_meta(self, scheduler_output: Any) -> KvferryMetadata:
        metadata: KvferryMetadata = _build(self, scheduler_output)
        metadata.num_tokens = scheduler_output.total_num_scheduled_tokens
        self.profile.write()
        return metadata

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.profile.step_begins()

    def clear_connector_metadata(self) -> None:
        self.profile.step_ends(self._get_connector_metadata().num_tokens)
        super().clear_connector_metadata()
        self.profile.write()

    def shutdown(self) -> None:
        super().shutdown()
        self.profile.write(at_once=True)


_build = _timed("build_connector_meta")
for _name in CALLS:
    if _name != "build_connector_meta":
        setattr(TimedConnector, _name, _timed(_name))
