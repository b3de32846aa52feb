"""Test FirstTokenScheduler with vLLM's own requests, blocks and outputs, without running a model.

vLLM's model runner V2, which the scheduler needs, does not run on CPUs without a Triton for them. So the scheduler alone is
called here, as vLLM's engine calls it. docs/performance.md has the runs on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.engines.connector import DECODE
from kvferry.engines.vllm_connector import KvferryConnector
from kvferry.engines.vllm_scheduler import FirstTokenScheduler
from kvferry.engines.vllm_sides import SchedulerSide, request_id_of
from tests.vllm.instances import connector
from transfer.connector.bound_prompts import PromptState, PromptView

BLOCK = 16
PROMPT = tuple(range(3, 103))
FIRST, SECOND, STOP = 200, 201, 202
PARAMS = {"do_remote_prefill": True, "transfer_id": "x", "remote_address": "127.0.0.1:1", "use_first_token": True}


class Leader:
    """Every prompt is ready at once, and has the same first token."""

    first_token = FIRST

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # by request id, of prompts that need their first token
        self.tokens: dict[str, int] = {}
        self.patience_s = -1.0  # of the last call

    def want(self, name: str, *what: object, needs_first_token: bool, **more: object) -> None:
        if needs_first_token:
            self.names[request_id_of(name)] = name

    def receive(self, request_id: str) -> None:
        if request_id in self.names:
            self.tokens[self.names[request_id]] = self.first_token

    def check(self) -> None: ...
    def bind(self, *what: object, **more: object) -> None: ...
    def cancel(self, *what: object, **more: object) -> None: ...
    def report_page_shortage(self, name: str) -> None: ...
    def decline(self, *what: object) -> None: ...

    def view(self, name: str) -> PromptView:
        return PromptView(state=PromptState.READY)

    def take_first_tokens(self, *, patience_s: float) -> dict[str, int]:
        self.patience_s = patience_s
        tokens, self.tokens = self.tokens, {}
        return tokens


class ReadyConnector(KvferryConnector):
    """The scheduler's part with a `Leader` of this file; vLLM loads it by its name."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.leader: Any = Leader()
        self._scheduler = SchedulerSide(self.leader, lambda blocks, _: blocks, sides=DECODE, engine_id="e", recomputes=True)

    def shutdown(self) -> None: ...


class Engine:
    """The scheduler, and the steps that an engine would make of its decisions."""

    def __init__(
        self,
        model: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        has_v2: bool = True,
        is_async: bool = True,
        num_blocks: int = 64,
        policy: str = "recompute",
        role: str = "kv_consumer",
    ) -> None:
        config = connector(role, policy=policy) | {
            "kv_connector": "ReadyConnector",
            "kv_connector_module_path": __name__,
        }
        self.config = EngineArgs(
            model=str(model), dtype="float32", kv_transfer_config=config, block_size=BLOCK, max_model_len=1024
        ).create_engine_config()
        # Not before: vLLM refuses a configuration with that runner and without Triton, and is synchronous on CPUs.
        self.config.scheduler_config.async_scheduling = is_async
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: has_v2))
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.config.cache_config.num_gpu_blocks = num_blocks
        init_none_hash(sha256)
        self.scheduler = FirstTokenScheduler(
            self.config,
            cache,
            StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(
        self, name: str = "a", params: Mapping[str, Any] = PARAMS, *, prompt: Sequence[int] = PROMPT, **sampling: Any
    ) -> Request:
        values = SamplingParams(**{"max_tokens": 5, "extra_args": {"kv_transfer_params": dict(params)}, **sampling})
        values.update_from_generation_config({}, eos_token_id=STOP)
        request = Request(name, list(prompt), values, None, block_hasher=get_request_block_hasher(BLOCK, sha256))
        self.scheduler.add_request(request)
        return request

    def step(self, *received: str, failed: tuple[str, ...] = (), token: int = SECOND) -> tuple[Any, list[EngineCoreOutput]]:
        """Schedule, and take a step's results: a token for each scheduled request, and requests that the workers report."""
        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[token] for _ in names],
            kv_connector_output=KVConnectorOutput(finished_recving=set(received), failed_recving=set(failed))
            if received
            else None,
        )
        outputs = self.scheduler.update_from_output(scheduled, output)
        return scheduled, [one for client in outputs.values() for one in client.outputs]

    def receive(self, name: str = "a", *, is_reported: bool = True, failed: tuple[str, ...] = ()) -> list[EngineCoreOutput]:
        """Let a request wait until its KV arrives. With `is_reported`, the workers report it in the same step."""
        self.step()  # the connector is asked
        self.step()  # it knows, and blocks are allocated
        assert self.scheduler.requests[name].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if name not in failed:
            self.scheduler.connector.leader.receive(name)
        scheduled, outputs = self.step(*([name] if is_reported else []), failed=failed)
        assert not scheduled.num_scheduled_tokens
        return outputs

    def assert_nothing_is_left(self) -> None:
        assert not self.scheduler.requests and not self.scheduler.has_unfinished_requests()
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.free


def test_the_client_gets_prefills_token_and_vllm_computes_the_second(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    engine = Engine(model, monkeypatch)
    request = engine.add()
    (output,) = engine.receive()
    assert (output.request_id, output.new_token_ids, output.finish_reason) == ("a", [FIRST], None)
    assert output.prefill_stats.num_external_cached_tokens == len(PROMPT)
    assert [event.type.name for event in output.events] == ["QUEUED", "SCHEDULED"]
    scheduled, outputs = engine.step()
    (new,) = scheduled.scheduled_new_reqs
    assert new.prefill_token_ids[: len(PROMPT) + 1] == [*PROMPT, FIRST] and new.num_computed_tokens == len(PROMPT)
    assert scheduled.num_scheduled_tokens == {"a": 1}
    assert [one.new_token_ids for one in outputs] == [[SECOND]]
    for number in range(3):
        _, outputs = engine.step(token=300 + number)
    assert [(one.new_token_ids, one.finish_reason) for one in outputs] == [([302], FinishReason.LENGTH)]
    assert list(request.output_token_ids) == [FIRST, SECOND, 300, 301, 302]
    engine.step()
    engine.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        ({"max_tokens": 1}, FIRST, FinishReason.LENGTH),
        ({}, STOP, FinishReason.STOP),
        ({"stop_token_ids": [FIRST]}, FIRST, FinishReason.STOP),
    ],
    ids=["limit", "end token", "stop token"],
)
def test_an_answer_of_one_token(
    monkeypatch: pytest.MonkeyPatch, model: Path, sampling: dict[str, Any], token: int, reason: FinishReason
) -> None:
    monkeypatch.setattr(Leader, "first_token", token)
    engine = Engine(model, monkeypatch)
    engine.add(**sampling)
    (output,) = engine.receive()
    assert (output.new_token_ids, output.finish_reason) == ([token], reason)
    scheduled, outputs = engine.step()
    assert not scheduled.num_scheduled_tokens and not outputs
    engine.assert_nothing_is_left()


def test_requests_without_use_first_token_are_scheduled_by_vllm(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    engine = Engine(model, monkeypatch)
    without = {name: value for name, value in PARAMS.items() if name != "use_first_token"}
    engine.add(params=without)
    assert engine.receive() == []
    scheduled, outputs = engine.step()
    (new,) = scheduled.scheduled_new_reqs
    assert new.num_computed_tokens == len(PROMPT) - 1 and [one.new_token_ids for one in outputs] == [[SECOND]]
    engine.add("b", params={})
    scheduled, outputs = engine.step()
    assert scheduled.num_scheduled_tokens["b"] == len(PROMPT) % BLOCK, "the rest is in the prefix cache"


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"logprob_token_ids": [5, 6]}], ids=str)
def test_requests_with_log_probabilities_compute_their_first_token(
    monkeypatch: pytest.MonkeyPatch, model: Path, sampling: dict[str, Any]
) -> None:
    engine = Engine(model, monkeypatch)
    engine.add(**sampling)
    assert engine.receive() == []


@pytest.mark.parametrize("length", [6 * BLOCK, 6 * BLOCK - 1])
def test_loaded_prompts_that_fill_the_pool_do_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, model: Path, length: int
) -> None:
    """vLLM schedules them before all others, and no request runs that could be preempted for them."""
    engine = Engine(model, monkeypatch, num_blocks=13)  # one is vLLM's null block
    for number, name in enumerate("abc"):
        engine.add(name, prompt=range(1000 * number, 1000 * number + length), max_tokens=40, ignore_eos=True)
    tokens, asked = Counter[str](), set[str]()
    for _ in range(400):
        waiting = {name for name, one in engine.scheduler.requests.items() if one.status is RequestStatus.WAITING_FOR_REMOTE_KVS}
        for name in waiting - asked:
            engine.scheduler.connector.leader.receive(name)
        _, outputs = engine.step(*(waiting - asked))
        asked |= waiting
        tokens.update({one.request_id: len(one.new_token_ids) for one in outputs})
    assert tokens == {"a": 40, "b": 40, "c": 40}
    engine.assert_nothing_is_left()


@pytest.mark.parametrize(("policy", "reasons"), [("recompute", []), ("fail", [FinishReason.ERROR])])
def test_a_request_whose_kv_fails_gets_no_token(
    monkeypatch: pytest.MonkeyPatch, model: Path, policy: str, reasons: list[FinishReason]
) -> None:
    engine = Engine(model, monkeypatch, policy=policy)
    engine.add()
    outputs = engine.receive(failed=("a",))
    assert [(one.new_token_ids, one.finish_reason) for one in outputs] == [([], reason) for reason in reasons]
    scheduled, _ = engine.step()
    assert scheduled.num_scheduled_tokens == ({"a": len(PROMPT)} if policy == "recompute" else {})


def test_an_aborted_request_gets_no_token(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    engine = Engine(model, monkeypatch)
    engine.add()
    engine.step()
    engine.step()
    engine.scheduler.connector.leader.receive("a")
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert engine.step("a")[1] == []
    engine.step()
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("ends_before", [False, True])
def test_the_token_does_not_wait_for_the_workers_report(monkeypatch: pytest.MonkeyPatch, model: Path, ends_before: bool) -> None:
    engine = Engine(model, monkeypatch)
    engine.add(max_tokens=1 if ends_before else 5)
    (output,) = engine.receive(is_reported=False)
    assert output.new_token_ids == [FIRST]
    if ends_before:
        engine.add("a", prompt=range(500, 600))  # the same id again, before the worker has reported the first one
        engine.step()
        assert engine.step("a")[1] == []
        assert engine.scheduler.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS, "the report is about the first one"
        engine.scheduler.connector.leader.receive("a")
    (output,) = engine.step("a")[1]
    assert output.new_token_ids == [FIRST if ends_before else SECOND]
    for _ in range(4):
        engine.step()
    engine.step()
    engine.assert_nothing_is_left()


def test_only_an_idle_engine_waits_for_a_token(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    engine = Engine(model, monkeypatch)
    leader = engine.scheduler.connector.leader
    engine.add()
    engine.receive()
    assert leader.patience_s > 0
    engine.step()
    assert leader.patience_s == 0, "a request runs"


def test_data_parallel_engines_do_not_wait_for_a_token(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    engine = Engine(model, monkeypatch)
    engine.config.parallel_config.data_parallel_size = 2
    engine.add()
    engine.receive()
    assert engine.scheduler.connector.leader.patience_s == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_v2": False}, "model runner"),
        ({"is_async": False}, "asynchronous scheduling"),
        ({"role": "kv_producer"}, "kv_role"),
    ],
)
def test_engines_that_cannot_use_first_tokens_schedule_as_vllms(
    monkeypatch: pytest.MonkeyPatch, model: Path, change: dict[str, Any], reason: str
) -> None:
    with structlog.testing.capture_logs() as logs:
        engine = Engine(model, monkeypatch, **change)
    (entry,) = [entry for entry in logs if entry["event"] == "first_tokens_not_used"]
    assert reason in entry["reason"]
    engine.add()
    assert engine.receive() == []
    assert engine.scheduler.connector.leader.patience_s == -1, "its leader is not asked"
    scheduled, _ = engine.step()
    assert scheduled.num_scheduled_tokens == {"a": 1} and scheduled.scheduled_new_reqs[0].num_computed_tokens == len(PROMPT) - 1
