"""Both parts of the vLLM connector, called as vLLM 0.32 calls them, with real kvferries behind them and no vLLM.

What its scheduler and workers hand over are plain objects with the attributes that its own have; tests/vllm runs the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.engines.connector import DECODE, PREFILL, Sides
from kvferry.engines.vllm_adapters import VllmAdapters
from kvferry.engines.vllm_sides import OutgoingStep, Results, SchedulerSide, StepMessage, WorkerSide
from tests.connector.conftest import Pair
from tests.connector.instances import DIM, HEADS, LAYERS, PAGES, Instance, kv_of, prompt_of, slots_of, wait_for
from transfer.connector import bound_prompts
from transfer.connector.bound_prompts import PromptState, PromptView
from transfer.connector.outgoing_rank import Free
from transfer.layer_groups import NO_PAGE

PROMPT = prompt_of(100)
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Vllm:
    """The connector's parts in an engine: one scheduler, a worker for each rank, steps between them."""

    def __init__(
        self,
        instance: Instance,
        *,
        recomputes: bool = True,
        sides: Sides = PREFILL | DECODE,
        layer_ends: Mapping[str, int] | None = None,
        adapters: VllmAdapters | None = None,
    ) -> None:
        self.instance = instance
        self.scheduler = SchedulerSide(
            instance.leader, filled, sides=sides, engine_id="engine-1", recomputes=recomputes, adapters=adapters
        )
        self.workers = [WorkerSide(rank, tables, layer_ends=layer_ends or {}) for rank in instance.ranks]
        self.on_layer: Callable[[int], None] = lambda layer: None  # called when a layer of a step is reported
        self.free = list(range(1, PAGES))  # block 0 is the null block
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.results = [Results() for _ in self.workers]

    def request(self, name: str, prompt: Sequence[int], params: dict[str, Any] | None, *, lora: Any = None) -> Any:
        request = SimpleNamespace(
            request_id=name,
            prompt_token_ids=list(prompt),
            kv_transfer_params=params,
            mm_features=[],
            prompt_embeds=None,
            skip_reading_prefix_cache=False,
            num_computed_tokens=0,
            output_token_ids=[],
            status="RUNNING",
            sampling_params=SimpleNamespace(num_logprobs=None),
            use_structured_output=False,
            resumable=False,
            lora_request=lora,
        )
        self.scheduler.added(request)
        return request

    def take(self, name: str, num_tokens: int) -> list[int]:
        """New blocks, for the request's first tokens up to there."""
        owned = self.blocks.setdefault(name, [])
        new = [self.free.pop(0) for _ in range(-(-num_tokens // self.instance.page_size) - len(owned))]
        owned.extend(new)
        return new

    def step(self, request: Any = None, num_tokens: int = 0, *, is_resumed: bool = False, preempted: Sequence[str] = ()) -> None:
        """One step of the engine: the request's next tokens, if any; preempted ones lose their blocks before."""
        scheduled = SimpleNamespace(
            preempted_req_ids=set(preempted) or None,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()),
            num_scheduled_tokens={},
        )
        if request is not None:
            name, begin = request.request_id, request.num_computed_tokens
            is_new = name not in self.blocks
            new = self.take(name, begin + num_tokens)
            if is_new:
                self.scheduler.allocated(request, (self.blocks[name],), 0)
            if is_new and not is_resumed:
                scheduled.scheduled_new_reqs.append(SimpleNamespace(req_id=name, block_ids=(new,), num_computed_tokens=begin))
            else:
                cached = scheduled.scheduled_cached_reqs
                cached.req_ids.append(name)
                cached.new_block_ids.append((new,) if new else None)
                cached.num_computed_tokens.append(begin)
                if is_resumed:
                    cached.resumed_req_ids.add(name)
            scheduled.num_scheduled_tokens[name] = num_tokens
        plan: StepMessage = self.scheduler.plan(scheduled)
        for worker in self.workers:
            worker.preempt(plan)
        if request is not None:
            self._compute(request, num_tokens, plan)
        for worker, results in zip(self.workers, self.results, strict=True):
            worker.computed(plan)
            found = worker.results()
            results.sent |= found.sent
            results.received |= found.received
            results.failed |= found.failed
        self.scheduler.received(sorted(self.results[0].received))

    def _compute(self, request: Any, num_tokens: int, plan: StepMessage) -> None:
        begin = request.num_computed_tokens
        end = request.num_computed_tokens = begin + num_tokens
        slots = slots_of(self.blocks[request.request_id], range(begin, end), self.instance.page_size)
        for layer in range(LAYERS):
            k, v = kv_of(request.prompt_token_ids, layer)
            for pool in self.instance.pools:
                heads = pool.shard.heads(4)
                mine = slice(heads.begin, heads.end)
                pool.write(layer, slots, k[begin:end, mine], v[begin:end, mine])
            for worker in self.workers:
                worker.layer_computed(plan, f"layer {layer}")
            self.on_layer(layer)

    def wanted(self, source: Instance, name: str = "b", transfer_id: str = "x") -> Any:
        """A request whose prompt the other side computes, or will."""
        params = {"do_remote_prefill": True, "transfer_id": transfer_id, "remote_address": source.leader.address}
        return self.request(name, PROMPT, params)

    def offered(self, name: str = "a", transfer_id: str = "x", prompt: Sequence[int] = PROMPT) -> Any:
        """A request whose prompt the other side will ask for."""
        return self.request(name, prompt, {"do_remote_decode": True, "transfer_id": transfer_id})

    def bind(self, request: Any, num_tokens: int = 100) -> None:
        """Blocks for the whole prompt, of which `num_tokens` are to come."""
        self.take(request.request_id, 100)
        self.scheduler.allocated(request, (self.blocks[request.request_id],), num_tokens)

    def preempt(self, request: Any) -> None:
        self.free = [*self.blocks.pop(request.request_id), *self.free]  # the very next to be used
        request.num_computed_tokens = 0

    def end(self, request: Any, *, is_done: bool = True) -> tuple[bool, dict[str, Any] | None]:
        request.status = "FINISHED_LENGTH_CAPPED" if is_done else "FINISHED_ABORTED"
        if is_done:
            request.output_token_ids = [7]
        return self.scheduler.finished(request, is_done=is_done)

    def wait_for(self, kind: str, name: str) -> None:
        """Step until every worker has told that of the request."""

        def look() -> bool:
            self.step()
            return all(name in getattr(results, kind) for results in self.results)

        wait_for(look, f"{name} is {kind}")

    def matched(self, request: Any, num_computed: int = 0) -> tuple[int, bool]:
        """As the scheduler asks, step for step, until it is told."""

        def look() -> tuple[int, bool] | None:
            self.step()
            num, is_async = self.scheduler.matched(request, num_computed)
            return None if num is None else (num, is_async)

        return wait_for(look, f"it is told what comes for {request.request_id}")


@pytest.fixture(scope="module")
def side() -> Iterator[Vllm]:
    """A prefill side, for requests that leave nothing."""
    instance = Instance(PREFILL, page_size=128)
    yield Vllm(instance)
    instance.close()


def tables(blocks: Sequence[Sequence[int]]) -> Sequence[list[int]]:
    return [list(table) for table in blocks]


def filled(blocks: Sequence[Sequence[int]], num_tokens: int) -> Sequence[list[int]]:
    """Page tables of a prompt that is fetched."""
    return tables(blocks)


def send(prefill: Vllm, name: str, prompt: Sequence[int], **params: Any) -> dict[str, Any]:
    """Have the prefill side compute a prompt in three steps; returns what its answer carries."""
    request = prefill.request(name, prompt, {"do_remote_decode": True, "do_remote_prefill": False} | params)
    third = len(prompt) // 3
    for num_tokens in (third, third, len(prompt) - 2 * third):
        prefill.step(request, num_tokens)
    is_held, answer = prefill.end(request)
    assert is_held and answer is not None
    return answer


def receive(decode: Vllm, name: str, prompt: Sequence[int], params: dict[str, Any]) -> list[int]:
    """Have the decode side fetch it; returns its blocks."""
    request = decode.request(name, prompt, dict(params))
    assert decode.matched(request) == (len(prompt), True)
    decode.take(name, len(prompt))
    decode.scheduler.allocated(request, (decode.blocks[name],), len(prompt))
    decode.wait_for("received", name)
    assert decode.scheduler.matched(request, 0) == (0, False), "it is not fetched twice"
    return decode.blocks[name]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (4, 2)])
def test_a_request_goes_from_one_to_the_other(pair: Pair, prefill_tp: int, decode_tp: int) -> None:
    source, target = pair({"tp_size": prefill_tp}, {"tp_size": decode_tp, "page_size": 24})
    prefill, decode = Vllm(source), Vllm(target)
    params = send(prefill, "a", PROMPT)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": params["transfer_id"],
        "remote_address": source.leader.address,
        "remote_engine_id": "engine-1",
    }
    blocks = receive(decode, "b", PROMPT, params)
    target.assert_has(blocks, PROMPT)
    prefill.wait_for("sent", "a")
    assert not any(results.failed for results in decode.results)
    source.assert_idle()
    target.assert_idle()


def test_both_are_asked_at_once(pair: Pair) -> None:
    source, target = pair({"tp_size": 2})
    prefill, decode = Vllm(source), Vllm(target)
    request = decode.wanted(source)
    decode.step()
    assert decode.scheduler.matched(request, 0) == (None, False), "nothing is held here while the other side has not begun"
    theirs = prefill.offered()
    prefill.step(theirs, 40)
    assert decode.matched(request) == (100, True)
    decode.bind(request)
    prefill.step(theirs, 60)
    prefill.end(theirs)
    decode.wait_for("received", "b")
    target.assert_has(decode.blocks["b"], PROMPT)
    prefill.wait_for("sent", "a")


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        ({}, {"b": 7}),
        ({"use_first_token": False}, {}),
        ({"may_use_first_tokens": False}, {}),
        ({"num_logprobs": 0}, {}),
        ({"use_structured_output": True}, {}),
        ({"resumable": True}, {}),
    ],
    ids=str,
)
def test_an_answer_begins_with_the_prefill_sides_token(pair: Pair, change: dict[str, Any], tokens: dict[str, int]) -> None:
    source, target = pair({"tp_size": 2})
    prefill, decode = Vllm(source), Vllm(target)
    decode.scheduler.may_use_first_tokens = change.get("may_use_first_tokens", True)
    params = send(prefill, "a", PROMPT) | {"use_first_token": change.get("use_first_token", True)}
    request = decode.request("b", PROMPT, params)
    request.sampling_params.num_logprobs = change.get("num_logprobs")
    request.use_structured_output = change.get("use_structured_output", False)
    request.resumable = change.get("resumable", False)
    assert decode.matched(request) == (100, True)
    decode.bind(request)
    wait_for(lambda: target.leader.view("b|1") is None, "it is settled, and vLLM's scheduler does not know it yet")
    assert decode.scheduler.take_first_tokens() == tokens
    assert decode.scheduler.take_first_tokens() == {}
    decode.wait_for("received", "b")
    target.assert_has(decode.blocks["b"], PROMPT)


def test_the_token_of_a_request_that_ends_before_its_kv_is_there_is_forgotten(pair: Pair) -> None:
    source, target = pair()
    prefill, decode = Vllm(source), Vllm(target)
    decode.scheduler.may_use_first_tokens = True
    request = decode.request("b", PROMPT, send(prefill, "a", PROMPT) | {"use_first_token": True})
    assert decode.matched(request) == (100, True)
    decode.bind(request)
    name = "b|1"  # the first prompt that this engine names
    assert target.leader.view(name) is not None
    wait_for(lambda: target.leader.view(name) is None, "it is settled, and no worker has reported it yet")
    decode.end(request, is_done=False)
    assert decode.scheduler.take_first_tokens() == {}
    decode.wait_for("received", "b")


def test_an_idle_engine_waits_for_the_token_of_a_request_that_has_its_kv(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_prompts, "LAST_PART_S", 600)
    source, target = pair()
    prefill, decode = Vllm(source), Vllm(target)
    decode.scheduler.may_use_first_tokens = True
    request = prefill.offered()
    prefill.step(request, 48)
    wanted = decode.wanted(source)
    wanted.kv_transfer_params["use_first_token"] = True
    assert decode.matched(wanted) == (100, True)
    assert decode.scheduler.take_first_tokens(patience_s=600) == {}, "nothing has arrived, so it does not wait"
    decode.bind(wanted)
    prefill.step(request, 52)
    wait_for(lambda: target.leader.incoming.prompts.transfers.newest_partial is not None, "the leader knows that the KV is there")
    with monkeypatch.context() as stalled:
        stalled.setattr(bound_prompts, "LAST_PART_S", 0)
        begun_s = time.monotonic()
        assert decode.scheduler.take_first_tokens(patience_s=60) == {}
        assert time.monotonic() - begun_s < 30, "it does not wait for a transfer that stalls"
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(decode.scheduler.take_first_tokens, patience_s=600)
        prefill.end(request)
        assert taken.result(timeout=60) == {"b": 7}


def begin_sending(prefill: Vllm, decode: Vllm, source: Instance) -> Any:
    """Compute 48 of 100 tokens of a prompt that the other side waits for; it is being sent in two groups of layers."""
    request = prefill.offered()
    prefill.step(request, 48)
    wanted = decode.wanted(source)
    assert decode.matched(wanted) == (100, True)
    decode.bind(wanted)
    wait_for(lambda: all(rank.layer_ends(["a|1"]) == {2, 4} for rank in source.ranks), "every rank sends the prompt")
    return request


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_first_layers_of_a_step_arrive_while_the_last_are_computed(pair: Pair, tp_size: int) -> None:
    source, target = pair({"tp_size": tp_size, "settings": {"chunk.chunk_tokens": 128, "chunk.layers_per_group": 2}})
    decode = Vllm(target)

    def look(layer: int) -> None:
        if layer == 1:  # not in the first step, which ends within the chunk
            wait_for(lambda: target.has(decode.blocks["b"], PROMPT, layers=range(2)), "two layers are there")
            assert not target.has(decode.blocks["b"], PROMPT, layers=range(2, 3))
            seen.append(layer)

    seen: list[int] = []
    prefill = Vllm(source, layer_ends={f"layer {layer}": layer + 1 for layer in range(LAYERS)})
    request = begin_sending(prefill, decode, source)
    prefill.on_layer = look
    prefill.step(request, 52)
    prefill.end(request)
    prefill.step()
    decode.wait_for("received", "b")
    assert seen == [1]
    target.assert_has(decode.blocks["b"], PROMPT)
    prefill.wait_for("sent", "a")
    assert all(not rank.layer_ends(["a|1"]) for rank in source.ranks)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_prompt_shorter_than_a_chunk_travels_by_a_plan_of_its_own(pair: Pair, tp_size: int) -> None:
    layer_bytes = 128 * 2 * HEADS * DIM * 4 // tp_size
    settings = {"chunk.chunk_tokens": 512, "chunk.piece_bytes": 2 * layer_bytes}
    source, target = pair({"tp_size": tp_size, "settings": settings})
    prefill, decode = Vllm(source), Vllm(target)
    request = begin_sending(prefill, decode, source)  # with two layers per piece, where long prompts have one
    prefill.step(request, 52)
    prefill.end(request)
    prefill.step()
    decode.wait_for("received", "b")
    target.assert_has(decode.blocks["b"], PROMPT)


class ReportedTo:
    """Records the reports about one prompt, while several prompts are being sent."""

    def __init__(self) -> None:
        self.reports: list[tuple[int | None, list[int], int, object]] = []
        self.num_ends_changes = 0
        self.ends = {"a|1": {2, 4}, "other": {1, 3}}

    def layer_ends(self, names: Iterable[str]) -> frozenset[int]:
        return frozenset().union(*(self.ends.get(name, ()) for name in names))

    def progress_all(self, prompts: Any, event: object, *, end_layer: int | None) -> None:
        ((_, (table,), num_computed),) = prompts
        self.reports.append((end_layer, list(table), num_computed, event))

    def finish(self, name: str) -> None: ...


def test_a_transfer_that_starts_or_ends_within_a_step_is_noticed() -> None:
    rank: Any = ReportedTo()
    worker = WorkerSide(rank, tables, layer_ends={f"{n}": n + 1 for n in range(4)})
    rank.ends = {}
    plan = StepMessage(steps=[OutgoingStep(name="a|1", blocks=([0],), is_fresh=True, first_token=0, num_computed=16)])
    for layer, ends in enumerate([{}, {"a|1": {2}}, {"a|1": {2}}]):
        rank.num_ends_changes += ends != rank.ends
        rank.ends = ends
        worker.layer_computed(plan, str(layer))
    worker.layer_computed(plan, "3")
    assert [end_layer for end_layer, *_ in rank.reports] == [2, None]


def test_a_workers_reports_within_steps() -> None:
    """Each report has a new event. The last layer is reported before the step ends. New blocks of a step are added once.

    The groups of other prompts in flight cause no reports. With 256 of them, a step of 80 layers had 57 reports instead of 4.
    """
    rank: Any = ReportedTo()
    reports, events = rank.reports, iter(range(100))
    worker = WorkerSide(rank, tables, record=lambda: cast(Any, next(events)), layer_ends={f"{n}": n + 1 for n in range(4)})
    for number in range(2):
        first, end = 16 * number, 16 * (number + 1)
        step = OutgoingStep(name="a|1", blocks=([number],), is_fresh=not number, first_token=first, num_computed=end)
        plan = StepMessage(steps=[step])
        for layer in (*"0123", "shared", "3"):  # a draft layer, which is computed for each drafted token
            worker.layer_computed(plan, layer)
        assert len(reports) == 2 * (number + 1), "before the step ends"
        worker.computed(plan)
    assert reports == [(2, [0], 16, 0), (None, [0], 16, 1), (2, [0, 1], 32, 2), (None, [0, 1], 32, 3)]
    step = OutgoingStep(name="a|1", blocks=(), is_fresh=False, first_token=32, num_computed=40)
    worker.computed(StepMessage(steps=[step]))
    assert reports[4:] == [(None, [0, 1], 40, 4)], "a replayed CUDA graph reports no layer"


def test_blocks_that_a_window_has_passed_leave_the_page_table() -> None:
    """vLLM may use them again in the same table, and a page table on a GPU must not have a page twice."""
    reports: list[list[list[int]]] = []

    class Rank:
        def progress_all(self, prompts: Any, event: object, *, end_layer: int | None) -> None:
            reports.append([tables for _, tables, _ in prompts])

    rank: Any = Rank()
    worker = WorkerSide(rank, tables, first_needed_pages=lambda next_token: (0, max(0, next_token - 32) // 16))
    for first, blocks in ((0, ([1, 2, 3], [4, 5, 6])), (48, ([7], [8])), (64, ([9], [4])), (80, ())):
        step = OutgoingStep(name="a|1", blocks=blocks, is_fresh=not first, first_token=first, num_computed=first + 16)
        worker.computed(StepMessage(steps=[step]))
    assert [found for ((_, found),) in reports] == [
        [4, 5, 6],  # a copy that still reads it sees no later change
        [NO_PAGE, 5, 6, 8],
        [NO_PAGE, NO_PAGE, 6, 8, 4],
        [NO_PAGE, NO_PAGE, NO_PAGE, 8, 4],
    ]
    assert reports[-1][0][0] == [1, 2, 3, 7, 9]


def test_what_the_decode_side_has_in_its_prefix_cache_is_not_sent(pair: Pair) -> None:
    source, target = pair()
    prefill, decode = Vllm(source), Vllm(target)
    params = send(prefill, "a", PROMPT)
    request = decode.request("b", PROMPT, dict(params))
    assert decode.scheduler.matched(request, 32) == (None, False)
    assert decode.matched(request, 48) == (52, True), "more of it is here than at first"
    decode.bind(request, 52)
    decode.wait_for("received", "b")
    target.assert_has(decode.blocks["b"], PROMPT, begin=48)
    assert not any(pool.buffer(0, is_v=False)[decode.blocks["b"][:3]].any() for pool in target.pools)
    prefill.wait_for("sent", "a")


def test_a_preempted_prompt_is_sent_from_its_new_blocks(pair: Pair) -> None:
    source, target = pair({"tp_size": 2})
    prefill, decode = Vllm(source), Vllm(target)
    request = decode.wanted(source)
    theirs = prefill.offered()
    prefill.step(theirs, 64)
    assert decode.matched(request) == (100, True)
    decode.bind(request)
    prefill.preempt(theirs)
    other = prefill.request("other", prompt_of(90, 5), None)
    prefill.step(other, 90, preempted=["a"])  # into the same blocks
    prefill.step(theirs, 70, is_resumed=True)
    prefill.step(theirs, 30)
    prefill.end(theirs)
    decode.wait_for("received", "b")
    assert not decode.results[0].failed
    target.assert_has(decode.blocks["b"], PROMPT)
    prefill.wait_for("sent", "a")


def test_the_prefill_side_aborts_and_the_decode_side_computes_it(pair: Pair) -> None:
    source, target = pair({"tp_size": 2})
    prefill, decode = Vllm(source), Vllm(target)
    theirs = prefill.offered()
    prefill.step(theirs, 40)
    request = decode.wanted(source)
    assert decode.matched(request) == (100, True)
    decode.bind(request)
    assert prefill.end(theirs, is_done=False) == (True, None), "its blocks may still be read"
    prefill.wait_for("sent", "a")
    decode.wait_for("received", "b")
    assert all(results.failed == {"b"} for results in decode.results), "vLLM computes it, or fails it; it uses nothing of it"
    late = decode.wanted(source, "c")
    assert decode.matched(late) == (0, False), "what failed before it had blocks is computed here"
    source.assert_idle()
    target.assert_idle()


def test_a_prompt_that_failed_before_it_had_blocks_ends_where_vllm_is_to_fail_it(pair: Pair) -> None:
    source, target = pair({"settings": {"limits.meet_timeout_s": 0.2}})
    decode = Vllm(target, recomputes=False)
    request = decode.wanted(source, "b", "never")
    assert decode.matched(request) == (100, True)
    decode.bind(request)
    decode.wait_for("received", "b")
    assert decode.results[0].failed == {"b"}


def test_a_request_that_is_aborted_while_it_waits_for_its_kv(pair: Pair) -> None:
    source, target = pair(None, {"tp_size": 2})
    prefill, decode = Vllm(source), Vllm(target)
    theirs = prefill.offered()
    prefill.step(theirs, 40)
    params = {"do_remote_prefill": True, "transfer_id": "x", "remote_address": source.leader.address}
    request = decode.request("b", PROMPT, dict(params))
    assert decode.matched(request) == (100, True)
    decode.bind(request)
    assert decode.end(request, is_done=False) == (False, None)
    decode.wait_for("received", "b")  # its blocks are vLLM's again, and not before
    unasked = decode.request("c", PROMPT, dict(params))
    decode.scheduler.matched(unasked, 0)
    decode.end(unasked, is_done=False)
    wait_for(lambda: target.leader.is_idle, "it is forgotten")
    prefill.step(theirs, 60)
    prefill.end(theirs)
    prefill.wait_for("sent", "a")
    source.assert_idle()
    target.assert_idle()


@pytest.mark.parametrize("sides", [PREFILL, DECODE])
def test_a_request_for_the_other_side_is_one_like_any_other(pair: Pair, sides: Sides, capsys: pytest.CaptureFixture[str]) -> None:
    """A router with its two lists swapped, or a client: the engine computes it, and says why."""
    instance = pair()[0 if sides is PREFILL else 1]
    vllm = Vllm(instance, sides=sides)
    params = {
        PREFILL: {"do_remote_prefill": True, "transfer_id": "x", "remote_address": "127.0.0.1:1"},
        DECODE: {"do_remote_decode": True, "transfer_id": "x"},
    }[sides]
    aborted = vllm.request("a", PROMPT, dict(params))
    assert vllm.end(aborted, is_done=False) == (False, None)
    request = vllm.request("b", PROMPT, dict(params))
    assert vllm.scheduler.matched(request, 0) == (0, False)
    vllm.step(request, 100)
    assert vllm.end(request) == (False, None)
    instance.leader.check()
    assert instance.leader.is_idle
    assert f"kv_role is {'kv_producer' if sides is PREFILL else 'kv_consumer'}" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("has", "transfer_id", "reason"),
    [
        ({"skip_reading_prefix_cache": True}, "x", "without any cache"),
        ({"mm_features": ["an image"]}, "", "inputs besides its tokens"),
    ],
)
def test_what_only_this_engine_can_compute_is_not_fetched(
    pair: Pair, has: dict[str, Any], transfer_id: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = pair()
    prefill, decode = Vllm(source), Vllm(target)
    params = {"do_remote_prefill": True, "remote_address": source.leader.address}
    if transfer_id:
        params["transfer_id"] = transfer_id
        theirs = prefill.request("a", PROMPT, {"do_remote_decode": True, "transfer_id": transfer_id})
        prefill.step(theirs, 100)
        prefill.end(theirs)
    request = decode.request("b", PROMPT, params)
    vars(request).update(has)
    assert decode.scheduler.matched(request, 0) == (0, False)
    assert decode.scheduler.matched(request, 0) == (0, False)
    if transfer_id:
        prefill.wait_for("sent", "a")  # it holds no blocks for it
    assert reason in "".join(capsys.readouterr())
    target.assert_idle()


def adapter(directory: Path, *, weights: bytes = b"weights", name: str = "sql", **changes: Any) -> Any:
    """vLLM's LoRARequest for a new adapter in that directory."""
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}", encoding="utf-8")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    plain = {"lora_name": name, "lora_int_id": 1, "lora_path": str(directory), "load_inplace": False, "is_3d_lora_weight": False}
    return SimpleNamespace(**plain | changes)


def test_a_prompt_with_an_adapter_goes_to_the_same_adapter(pair: Pair, tmp_path: Path) -> None:
    source, target = pair()
    prefill, decode = Vllm(source, adapters=VllmAdapters()), Vllm(target, adapters=VllmAdapters())
    for name, there, here in (
        ("adapter", adapter(tmp_path / "there"), adapter(tmp_path / "here", lora_int_id=4)),
        ("base", None, None),
    ):
        theirs = prefill.request(f"a-{name}", PROMPT, {"do_remote_decode": True, "transfer_id": name}, lora=there)
        prefill.step(theirs, 100)
        prefill.end(theirs)
        params = {"do_remote_prefill": True, "transfer_id": name, "remote_address": source.leader.address}
        request = decode.request(f"b-{name}", PROMPT, params, lora=here)
        assert decode.matched(request) == (100, True)
        decode.bind(request)
        decode.wait_for("received", f"b-{name}")
        target.assert_has(decode.blocks[f"b-{name}"], PROMPT)
        prefill.wait_for("sent", f"a-{name}")
    source.assert_idle()
    target.assert_idle()


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({}, None),
        (None, {}),
        ({"name": "chat"}, {"name": "sql"}),
        ({"weights": b"of Monday"}, {"weights": b"of Friday"}),
    ],
    ids=["base", "base-there", "name", "revision"],
)
def test_the_same_tokens_with_another_adapter_are_refused_and_computed(
    pair: Pair, tmp_path: Path, there: dict[str, Any] | None, here: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = pair()
    prefill, decode = Vllm(source, adapters=VllmAdapters()), Vllm(target, adapters=VllmAdapters())
    ours, theirs = (
        None if one is None else adapter(tmp_path / place, **one) for place, one in (("here", here), ("there", there))
    )
    offered = prefill.request("a", PROMPT, {"do_remote_decode": True, "transfer_id": "x"}, lora=theirs)
    prefill.step(offered, 100)
    prefill.end(offered)
    params = {"do_remote_prefill": True, "transfer_id": "x", "remote_address": source.leader.address}
    assert decode.matched(decode.request("b", PROMPT, params, lora=ours)) == (0, False)
    prefill.wait_for("sent", "a")  # it holds no blocks for it
    said = "".join(capsys.readouterr())
    assert "prompt_recomputed" in said and "LoRA adapter or revision differ" in said
    for one in (ours, theirs):
        assert one is None or f":{one.lora_name}'" in said
    target.assert_idle()


def test_an_adapter_of_unknown_revision_is_moved_on_neither_side(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = pair()
    prefill, decode = Vllm(source, adapters=VllmAdapters()), Vllm(target, adapters=VllmAdapters())
    lora = adapter(tmp_path / "a", load_inplace=True)
    prefill.step(offered := prefill.request("a", PROMPT, {"do_remote_decode": True, "transfer_id": "x"}, lora=lora), 100)
    assert prefill.end(offered) == (False, None)
    params = {"do_remote_prefill": True, "transfer_id": "x", "remote_address": source.leader.address}
    assert decode.matched(decode.request("b", PROMPT, params, lora=lora)) == (0, False)
    known = adapter(tmp_path / "b", lora_int_id=2)
    unnamed = {"do_remote_prefill": True, "remote_address": source.leader.address}
    assert decode.matched(decode.request("c", PROMPT, unnamed, lora=known)) == (0, False)
    said = "".join(capsys.readouterr())
    assert "request_not_handed_over" in said and said.count("was loaded in place") == 2
    assert "a prefill node computes prompts without an adapter" in said
    source.assert_idle()
    target.assert_idle()


def test_blocks_that_are_lacking_come_from_a_request_that_prefill_has_preempted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound_prompts, "YIELD_AFTER_S", 0.3)
    source, target = pair()
    prefill, decode = Vllm(source), Vllm(target)
    first = decode.wanted(source)
    theirs = prefill.offered()
    prefill.step(theirs, 64)
    assert decode.matched(first) == (100, True)
    decode.bind(first)
    prefill.preempt(theirs)
    prefill.step(preempted=["a"])
    params = send(prefill, "c", PROMPT)
    second = decode.request("d", PROMPT, dict(params))

    def is_given() -> bool:
        assert decode.scheduler.matched(second, 0) in [(None, False), (100, True)]  # and vLLM has no blocks for it
        decode.step()
        return "b" in decode.results[0].failed

    wait_for(is_given, "the first request has given its blocks")
    decode.blocks["d"] = decode.blocks.pop("b")
    decode.scheduler.allocated(second, (decode.blocks["d"],), 100)
    decode.wait_for("received", "d")
    target.assert_has(decode.blocks["d"], PROMPT)
    assert decode.results[0].failed == {"b"}


def test_a_request_id_that_comes_again(pair: Pair) -> None:
    """At once, while the one before is still known; vLLM can be told to leave clients' ids as they are."""
    source, target = pair({"tp_size": 2})
    prefill, decode = Vllm(source), Vllm(target)
    before = prefill.offered("a", "x", prompt_of(64, 3))
    prefill.step(before, 40)
    prefill.end(before, is_done=False)
    prefill.blocks.pop("a")
    request = prefill.offered("a", "y")
    prefill.step(request, 50)
    prefill.step(request, 50)
    _, params = prefill.end(request)
    assert params is not None
    blocks = receive(decode, "b", PROMPT, params)
    target.assert_has(blocks, PROMPT)

    def is_over() -> bool:
        prefill.step()
        return source.leader.is_idle and all(rank.is_idle for rank in source.ranks)

    wait_for(is_over, "both are sent, or given up")
    assert prefill.results[0].sent == {"a"}


def test_a_request_that_never_had_blocks_holds_none(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = pair()
    prefill = Vllm(source)
    (rank,) = source.ranks
    heard: list[Any] = []
    poll_events = rank.poll_events
    monkeypatch.setattr(rank, "poll_events", lambda: [heard.append(news) or news for news in poll_events()])
    request = prefill.offered()
    assert prefill.end(request, is_done=False) == (False, None)

    def is_over() -> bool:
        prefill.step()
        return any(isinstance(news, Free) for news in heard)

    wait_for(is_over, "it is over")
    assert not prefill.results[0].sent, "vLLM has forgotten it, and would fail an assertion"
    source.assert_idle()


@pytest.mark.parametrize("params", [None, {"some_other_connector": 1}, ["do_remote_decode"]])
def test_params_that_are_not_ours_end_nothing(side: Vllm, params: Any, capsys: pytest.CaptureFixture[str]) -> None:
    request = side.request(f"a{params}", PROMPT, params)
    assert side.scheduler.matched(request, 0) == (0, False)
    side.step(request, 100)
    assert side.end(request) == (False, None)
    is_object = params is None or isinstance(params, dict)
    assert "".join(capsys.readouterr()).count("kv_transfer_params_ignored") == (0 if is_object else 1)
    aborted = side.request(f"b{params}", PROMPT, None)
    aborted.kv_transfer_params = params  # a vLLM without the hook
    assert side.end(aborted, is_done=False) == (False, None)
    assert side.instance.leader.is_idle


@pytest.mark.parametrize("transfer_id", [17, "x" * 97, "t\ud800"])
def test_a_transfer_id_that_cannot_be_is_not_taken(side: Vllm, transfer_id: Any, capsys: pytest.CaptureFixture[str]) -> None:
    request = side.request(f"id {transfer_id!r:.9}", PROMPT, {"do_remote_decode": True, "transfer_id": transfer_id})
    side.step(request, 100)
    assert side.end(request) == (False, None)
    assert "transfer_id is" in "".join(capsys.readouterr())


class AskedLeader:
    """Record the arguments of `want`."""

    def __init__(self) -> None:
        self.traceparents: list[str] = []

    def check(self) -> None:
        pass

    def want(self, name: str, *what: object, traceparent: str, **rest: object) -> None:
        self.traceparents.append(traceparent)


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        (None, ""),
        ({"tracestate": "a=b"}, ""),
        ({"traceparent": TRACEPARENT, "tracestate": "a=b"}, TRACEPARENT),
        ({"traceparent": "00-1-2-01"}, ""),
        ({"traceparent": "\u00e9\n"}, ""),
    ],
)
def test_a_fetch_belongs_to_the_clients_trace(headers: dict[str, str] | None, told: str) -> None:
    leader: Any = AskedLeader()
    scheduler = SchedulerSide(leader, filled, sides=DECODE, engine_id="e", recomputes=True)
    request = SimpleNamespace(
        request_id="b",
        prompt_token_ids=list(PROMPT),
        kv_transfer_params={"do_remote_prefill": True, "transfer_id": "x", "remote_address": "p:1"},
        trace_headers=headers,
    )
    assert scheduler.matched(request, 0) == (None, False)
    assert leader.traceparents == [told]


@pytest.mark.parametrize("can_start_late", [True, False])
def test_a_prefix_cache_that_grows_before_there_are_blocks(can_start_late: bool) -> None:
    """Start the prompt late if its prefill node supports that, and otherwise request it again."""
    told: list[object] = []
    leader = SimpleNamespace(
        check=lambda: None,
        want=lambda name, transfer_id, source, token_ids, **said: told.append(said),
        view=lambda name: PromptView(state=PromptState.READY, can_start_late=can_start_late),
        cancel=lambda name, reason, *, is_wanted_again: told.append(reason),
        bind=lambda name, tables, *, start_token: told.append((tables, start_token)),
    )
    scheduler = SchedulerSide(cast(Any, leader), filled, sides=DECODE, engine_id="engine-1", recomputes=True)
    request = SimpleNamespace(
        request_id="b",
        prompt_token_ids=list(PROMPT),
        kv_transfer_params={"do_remote_prefill": True, "transfer_id": "x", "remote_address": "127.0.0.1:1"},
        mm_features=[],
        prompt_embeds=None,
        trace_headers={"traceparent": TRACEPARENT},
    )
    assert scheduler.matched(request, 32) == (None, False)
    rest = {"needs_first_token": False, "traceparent": TRACEPARENT, "cache_salt": ""}
    assert told == [{"start_token": 32, **rest}]
    if not can_start_late:
        assert scheduler.matched(request, 48) == (None, False)
        assert told[1:] == ["its start in the prompt has changed", {"start_token": 48, **rest}]
    assert scheduler.matched(request, 48) == (52, True)
    scheduler.allocated(request, ([4, 5],), 52)
    assert told[-1] == ([[4, 5]], 48)
