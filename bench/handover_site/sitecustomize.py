"""Record when functions of the router, vLLM, SGLang and kvferry are called: part of `bench.handovers` and `bench.lone_request`.

A process that has this folder in PYTHONPATH, and the folder of records in HANDOVERS, appends a line for each call of a
function in `POINTS`: the monotonic time in nanoseconds and the label. The clock is the same in all processes of a machine. A
record takes a few microseconds.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("HANDOVERS", "")


def _is_scheduled(arguments: Any, result: Any) -> bool:
    return bool(result.total_num_scheduled_tokens > 0)


def _has_tokens(arguments: Any, result: Any) -> bool:
    return bool(arguments[1].total_num_scheduled_tokens > 0)


def _is_known(arguments: Any, result: Any) -> bool:
    return result[0] is not None and result[0] > 0


def _has_received(arguments: Any, result: Any) -> bool:
    return bool(result.received)


_COMPLETIONS = "vllm.entrypoints.openai.completion.serving"
_SGLANG_DECODE, _SGLANG_PREFILL = "sglang.srt.disaggregation.decode", "sglang.srt.disaggregation.prefill"

# Module, function, label, whether the end of the call counts, and which calls count by their arguments and result.
POINTS: tuple[tuple[str, str, str, bool, Callable[[Any, Any], bool] | None], ...] = (
    ("kvferry.router.app", "RouterApp._generate", "request arrives", False, None),
    ("kvferry.router.http_server", "HttpServer._post", "request sent on", False, None),
    ("kvferry.router.app", "Reply.write", "part of the answer sent", False, None),
    (_COMPLETIONS, "OpenAIServingCompletion.create_completion", "API has the request", False, None),
    ("vllm.v1.engine.async_llm", "AsyncLLM.add_request", "API gives it to the engine", False, None),
    ("vllm.v1.engine.core", "EngineCore.add_request", "engine has the request", False, None),
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule", "step scheduled", True, _is_scheduled),
    ("vllm.v1.worker.gpu_worker", "Worker.execute_model", "worker begins a step", False, _has_tokens),
    ("vllm.v1.worker.gpu_worker", "Worker.execute_model", "worker has queued a step", True, _has_tokens),
    ("vllm.v1.worker.gpu_worker", "Worker.sample_tokens", "worker has queued the sampling", True, None),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", "step has results", False, _has_tokens),
    ("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs", "API has tokens", False, None),
    ("kvferry.engines.vllm_sides", "SchedulerSide.added", "scheduler offers the prompt", False, None),
    ("kvferry.engines.vllm_sides", "SchedulerSide.matched", "scheduler learns that KV will come", True, _is_known),
    ("kvferry.engines.vllm_sides", "SchedulerSide.allocated", "scheduler has blocks", False, None),
    ("kvferry.engines.vllm_sides", "WorkerSide.computed", "step is queued on the device", False, None),
    ("kvferry.engines.vllm_sides", "WorkerSide.results", "worker reports the KV to vLLM", True, _has_received),
    ("transfer.connector.bound_prompts", "BoundPrompts.want", "leader wants the prompt", False, None),
    ("transfer.connector.bound_prompts", "BoundPrompts.bind", "leader has the blocks", False, None),
    ("transfer.connector.offered_prompts", "OfferedPrompts.offer", "leader has the offer", False, None),
    ("transfer.connector.offered_prompts", "OfferedPrompts._take_room", "leader asks for room", False, None),
    ("transfer.connector.outgoing_rank", "OutgoingRank.start", "rank starts the transfer", False, None),
    ("transfer.connector.outgoing_rank", "OutgoingRank.progress", "rank hears of computed tokens", False, None),
    ("transfer.send.loop", "SenderLoop._gather", "gather queued", False, None),
    ("transfer.send.loop", "SenderLoop._write", "write begins", False, None),
    ("transfer.connector.outgoing_rank", "OutgoingRank.on_sent", "rank has sent everything", False, None),
    ("transfer.connector.incoming_rank", "IncomingRank.expect", "rank expects the transfer", False, None),
    ("transfer.receive.loop", "ReceiverLoop._scatter", "scatter queued", False, None),
    ("transfer.connector.incoming_rank", "IncomingRank.on_complete", "rank has everything", False, None),
    # SGLang
    ("sglang.srt.managers.tokenizer_manager", "TokenizerManager.generate_request", "API has the request", False, None),
    ("sglang.srt.managers.scheduler", "Scheduler.handle_generate_request", "engine has the request", False, None),
    ("sglang.srt.managers.scheduler", "Scheduler.run_batch", "step begins", False, None),
    (_SGLANG_DECODE, "DecodePreallocQueue._pre_alloc", "scheduler allocates pages", False, None),
    (_SGLANG_DECODE, "DecodePreallocQueue._send_kv_metadata", "scheduler asks for the KV", False, None),
    (_SGLANG_DECODE, "DecodeTransferQueue._commit_transfer_to_req", "scheduler has the KV", False, None),
    (_SGLANG_PREFILL, "PrefillBootstrapQueue.create_sender", "scheduler has the prompt", False, None),
    (_SGLANG_PREFILL, "PrefillBootstrapQueue.finalize_bootstrap", "scheduler knows that decode waits", False, None),
    (_SGLANG_PREFILL, "SchedulerDisaggregationPrefillMixin.send_kv_chunk", "scheduler sends KV", False, None),
    ("sglang.srt.managers.scheduler", "Scheduler.process_batch_result", "step has results", False, None),
    ("sglang.srt.managers.tokenizer_manager", "TokenizerManager._handle_batch_output", "API has tokens", False, None),
    ("kvferry.engines.sglang_transfers", "OutgoingPrompt.offer", "scheduler offers the prompt", False, None),
    ("kvferry.engines.sglang_transfers", "OutgoingPrompt.begin", "scheduler may compute the prompt", False, None),
    ("kvferry.engines.sglang_transfers", "OutgoingPrompt.send", "scheduler sends pages", False, None),
    ("kvferry.engines.sglang_transfers", "OutgoingPrompt.on_event", "scheduler has news", False, None),
    ("kvferry.engines.sglang_transfers", "IncomingPrompt.bind", "scheduler has blocks", False, None),
    ("kvferry.engines.sglang_transfers", "IncomingPrompt.on_event", "scheduler has news", False, None),
    # Daemons
    ("decode_node.node", "DecodeNode._submit", "leader has the request", False, None),
    ("transfer.connector.prefill_peer", "PrefillPeer.prefill", "leader calls prefill", False, None),
    ("transfer.connector.incoming", "IncomingTransfers.reserve", "leader takes room", False, None),
    ("transfer.connector.incoming", "IncomingTransfers.on_expected", "a rank expects the transfer", False, None),
    ("transfer.connector.incoming", "IncomingTransfers.on_whole", "a rank has everything", False, None),
    ("transfer.connector.outgoing", "OutgoingTransfers.submit", "leader has the prompt", False, None),
    ("transfer.connector.outgoing", "OutgoingTransfers._reserve_room", "leader asks for room", False, None),
    ("transfer.connector.outgoing", "OutgoingTransfers._start", "leader starts the ranks", False, None),
    ("transfer.connector.outgoing", "OutgoingTransfers._on_computed", "leader has the first token", False, None),
    ("prefill_node.worker", "PrefillWorker._start_request", "rank has the transfer", False, None),
    ("prefill_node.worker", "PrefillWorker._run_step", "rank has the step", False, None),
    ("prefill_node.worker", "PrefillWorker._on_layers_written", "rank hears of computed layers", False, None),
    ("null_engine", "NullEngine.prefill", "engine begins the step", False, None),
    ("transfer.send.loop", "SenderLoop._on_payload", "rank has a control message", False, None),
    ("transfer.receive.loop", "ReceiverLoop._on_received", "rank has a control message", False, None),
    ("decode_node.worker", "DecodeWorker._expect", "rank expects the transfer", False, None),
    ("decode_node.requests", "DecodeRequests._run", "leader has KV and first token", False, None),
)


def _record(label: str) -> None:
    os.write(_file(), f"{time.monotonic_ns()}\t{label}\n".encode())


@functools.cache
def _opened(pid: int) -> int:
    role = os.environ.get("HANDOVERS_ROLE", "process")
    return os.open(f"{FOLDER}/{role}.{pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _file() -> int:
    return _opened(os.getpid())


def _recorded(function: Any, label: str, at_end: bool, counts: Callable[[Any, Any], bool] | None) -> Any:
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(inspect.unwrap(function)):
        at_end, counts = False, None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not at_end:
            if counts is None or counts(args, None):
                _record(label)
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        if counts is None or counts(args, result):
            _record(label)
        return result

    return call


def _patch(module: ModuleType) -> None:
    for name, path, label, at_end, counts in POINTS:
        if name != module.__name__:
            continue
        owner: Any = module
        *outer, last = path.split(".")
        for one in outer:
            owner = getattr(owner, one)
        setattr(owner, last, _recorded(getattr(owner, last), label, at_end, counts))


class _Loader(importlib.abc.Loader):
    """Patches a module once it is loaded."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    _names = frozenset(point[0] for point in POINTS)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if FOLDER:
    sys.meta_path.insert(0, _Finder())
