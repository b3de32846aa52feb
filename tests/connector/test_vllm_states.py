"""Recurrent states, in schedulers that allocate and free blocks as vLLM 0.32 does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.engines.connector import DECODE, PREFILL, Sides
from kvferry.engines.vllm_layout import NULL_BLOCK, VllmLayout
from kvferry.engines.vllm_sides import SchedulerSide, StepMessage, WorkerSide
from tests.connector.instances import DIM, HEADS, PAGES, Instance, kv_of, prompt_of, slots_of, target, wait_for
from transfer.connector.outgoing import Transfer
from transfer.layer_groups import layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard
from transfer.pool.kv_pool import KVPool, LayerBuffers, PoolView

RECURRENT = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=HEADS, k_head_dim=6, v_head_dim=0, dtype=DType.FLOAT32)
CONVOLUTION = replace(RECURRENT, num_kv_heads=1, k_head_dim=3, dtype=DType.BFLOAT16)  # each rank has a copy
LAYOUT = KVLayout(
    layers=(RECURRENT, CONVOLUTION, LayerSpec(num_kv_heads=HEADS, k_head_dim=DIM, v_head_dim=DIM)), dtype=DType.FLOAT32
)
FULL = 2
STATES, TOKENS = 0, 1
"""vLLM's block tables."""


def layout_of(shard: Shard, sizes: Sequence[int]) -> VllmLayout:
    """`sizes` are the tokens of a block in each of vLLM's block tables."""
    full, states = layer_groups(LAYOUT)
    return VllmLayout(
        layout=LAYOUT,
        shard=shard,
        layers=(),
        kv_scales=(),
        groups=(full, replace(states, layers=(0,)), replace(states, layers=(1,))),
        block_groups=(TOKENS, STATES, STATES),
        page_sizes=(sizes[TOKENS], sizes[STATES], sizes[STATES]),
        window_tables=(),
        num_blocks=PAGES,
        shared_layers=frozenset(),
    )


def pool_of(shard: Shard, sizes: Sequence[int]) -> KVPool:
    heads, layout = len(shard.heads(HEADS)), layout_of(shard, sizes)
    tokens = (PAGES, sizes[TOKENS], heads, DIM)
    buffers = [
        LayerBuffers(k=torch.zeros(PAGES, 1, heads, 6), v=None),
        LayerBuffers(k=torch.zeros(PAGES, 1, 1, 3, dtype=torch.bfloat16), v=None),
        LayerBuffers(k=torch.zeros(tokens), v=torch.zeros(tokens)),
    ]
    return PoolView(layout=LAYOUT, shard=shard, buffers=buffers, groups=layout.groups, page_sizes=layout.page_sizes)


def state_after(tokens: Sequence[int], spec: LayerSpec) -> Tensor:
    """[heads, dim]; depends on all tokens and their number."""
    value = sum((index + 1) * token for index, token in enumerate(tokens)) % 251
    return torch.arange(spec.num_kv_heads * spec.k_head_dim).view(spec.num_kv_heads, -1).remainder(7) + value


class Vllm:
    """An engine with the connector's parts."""

    def __init__(self, instance: Instance, sides: Sides, sizes: Sequence[int]) -> None:
        self.instance = instance
        self.sizes = sizes
        self.unused = list(range(PAGES - 1, NULL_BLOCK, -1))
        self.tables: dict[str, tuple[list[int], list[int]]] = {}
        layout = layout_of(Shard(page_size=sizes[TOKENS]), sizes)
        self.scheduler = SchedulerSide(
            instance.leader,
            layout.tables_to_fill,
            sides=sides,
            engine_id="e",
            recomputes=True,
            state_block_tokens=layout.state_block_tokens,
        )
        self.scheduler.may_use_first_tokens = True
        self.workers = [
            WorkerSide(
                rank,
                layout.page_tables,
                tables_to_read=layout.tables_to_read,
                clear_tail=partial(layout_of(pool.shard, sizes).clear_tail, pool),
            )
            for rank, pool in zip(instance.ranks, instance.pools, strict=True)
        ]
        self.done: list[set[str]] = [set() for _ in self.workers]

    def request(self, name: str, prompt: Sequence[int], params: dict[str, Any] | None, **changes: Any) -> Any:
        fields: dict[str, Any] = {
            "request_id": name,
            "prompt_token_ids": list(prompt),
            "_all_token_ids": list(prompt),
            "num_prompt_tokens": len(prompt),
            "kv_transfer_params": params,
            "max_tokens": 1,
            "mm_features": [],
            "prompt_embeds": None,
            "num_computed_tokens": 0,
            "output_token_ids": [],
            "status": "RUNNING",
            "sampling_params": SimpleNamespace(num_logprobs=None),
            "use_structured_output": False,
            "resumable": False,
        }
        request = SimpleNamespace(**{**fields, **changes})
        self.scheduler.added(request)
        return request

    def allocate(self, name: str, num_tokens: int) -> tuple[list[int], list[int]]:
        """Return new entries of the tables. Before the last state's block, there is none."""
        states, tokens = self.tables.setdefault(name, ([], []))
        new: tuple[list[int], list[int]] = ([], [])
        while len(tokens) < -(-num_tokens // self.sizes[TOKENS]):
            tokens.append(self.unused.pop())
            new[TOKENS].append(tokens[-1])
        last = (num_tokens - 1) // self.sizes[STATES]
        if len(states) <= last:
            new[STATES].extend([NULL_BLOCK] * (last - len(states)) + [self.unused.pop()])
            states.extend(new[STATES])
        return new

    def step(self, request: Any = None, num_tokens: int = 0) -> None:
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        scheduled = SimpleNamespace(
            preempted_req_ids=set(), scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={}
        )
        if request is not None:
            name, begin = request.request_id, request.num_computed_tokens
            end = begin + num_tokens
            cached.resumed_req_ids |= set() if name in self.tables else {name}
            cached.req_ids.append(name)
            cached.new_block_ids.append(self.allocate(name, end))
            cached.num_computed_tokens.append(begin)
            scheduled.num_scheduled_tokens[name] = num_tokens
        plan: StepMessage = self.scheduler.plan(scheduled)
        if request is not None:
            request.num_computed_tokens = end
            self.write(request, range(begin, end))
            self.free_earlier_states(name)
        for worker, done in zip(self.workers, self.done, strict=True):
            worker.begin_loads(plan)
            worker.computed(plan)
            found = worker.results()
            assert not found.failed
            done |= found.sent | found.received

    def free_earlier_states(self, name: str) -> None:
        """The next request takes them."""
        states = self.tables[name][STATES]
        for index, block in enumerate(states[:-1]):
            if block != NULL_BLOCK:
                self.unused.append(block)
                states[index] = NULL_BLOCK

    def write(self, request: Any, tokens: range) -> None:
        states, blocks = self.tables[request.request_id]
        prompt = request.prompt_token_ids
        k, v = kv_of(prompt, FULL)
        slots = slots_of(blocks, tokens, self.sizes[TOKENS])
        for pool in self.instance.pools:
            heads = pool.shard.heads(HEADS)
            mine = slice(heads.begin, heads.end)
            pool.write(FULL, slots, k[tokens.start : tokens.stop, mine], v[tokens.start : tokens.stop, mine])
            for layer, found in self.states_of(pool, states[(tokens.stop - 1) // self.sizes[STATES]]):
                found.copy_(self.wanted(pool, layer, prompt[: tokens.stop]))

    def states_of(self, pool: KVPool, block: int) -> Iterator[tuple[int, Tensor]]:
        for layer in (0, 1):
            yield layer, pool.buffer(layer, is_v=False)[block, 0]

    def wanted(self, pool: KVPool, layer: int, tokens: Sequence[int]) -> Tensor:
        spec = LAYOUT.layers[layer]
        heads = pool.shard.heads(spec.num_kv_heads)
        return state_after(tokens, spec)[heads.begin : heads.end]

    def wait_for(self, name: str) -> None:
        def look() -> bool:
            self.step()
            return all(name in done for done in self.done)

        wait_for(look, f"{name} is sent or received")

    def load(self, name: str, prompt: Sequence[int], params: dict[str, Any]) -> Any:
        """Fetch a prompt into new blocks."""
        request = self.request(name, prompt, params)

        def look() -> bool:
            self.step()
            return self.scheduler.matched(request, 0)[0] is not None

        wait_for(look, "the prompt can be loaded")
        assert self.scheduler.matched(request, 0) == (len(prompt) - 1, True)
        for pool in self.instance.pools:
            for is_v in (False, True):
                pool.buffer(FULL, is_v=is_v).fill_(torch.nan)  # what a state in another element type can be
        self.allocate(name, len(prompt) - 1)
        self.scheduler.allocated(request, self.tables[name], len(prompt) - 1)
        self.wait_for(name)
        return request

    def assert_has(self, request: Any, tokens: Sequence[int]) -> None:
        states, blocks = self.tables[request.request_id]
        slots = slots_of(blocks, range(len(tokens)), self.sizes[TOKENS])
        for pool in self.instance.pools:
            heads = pool.shard.heads(HEADS)
            for found, wanted in zip(pool.read(FULL, slots), kv_of(tokens, FULL), strict=True):
                assert torch.equal(found, wanted[:, heads.begin : heads.end])
            written = torch.zeros(len(blocks) * self.sizes[TOKENS], dtype=torch.bool)
            written[: len(tokens)] = True
            every = slots_of(blocks, range(len(written)), self.sizes[TOKENS])
            for found in pool.read(FULL, every):
                assert not found[~written].any(), "attention multiplies elements behind the last token by 0, and NaN stays"
            for layer, state in self.states_of(pool, states[-1]):
                assert torch.equal(state, self.wanted(pool, layer, tokens).to(state.dtype)), f"layer {layer}"


NONE = 1024
"""Tokens of a block of states if vLLM keeps none for later prompts."""


@pytest.fixture(params=[(1, (32, 16), 2, (48, 8)), (2, (16, 8), 1, (NONE, 16)), (1, (NONE, 16), 1, (NONE, 16))], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Vllm, Vllm]]:
    prefill_tp, prefill_sizes, decode_tp, decode_sizes = request.param
    source = Instance(PREFILL, tp_size=prefill_tp, page_size=prefill_sizes[TOKENS], pool_of=partial(pool_of, sizes=prefill_sizes))
    try:
        decode = target(source, tp_size=decode_tp, page_size=decode_sizes[TOKENS], pool_of=partial(pool_of, sizes=decode_sizes))
        try:
            yield Vllm(source, PREFILL, prefill_sizes), Vllm(decode, DECODE, decode_sizes)
        finally:
            decode.close()
    finally:
        source.close()


@pytest.mark.parametrize("num_tokens", [2, 33, 34, 97, 100])
def test_the_state_before_the_last_token_arrives(pair: tuple[Vllm, Vllm], num_tokens: int) -> None:
    """Decode computes the last token, so its state must not have it. Meanwhile, another request takes freed blocks."""
    prefill, decode = pair
    prompt = prompt_of(num_tokens)
    request = prefill.request("a", prompt, {"do_remote_decode": True})
    assert request.prompt_token_ids == vars(request)["_all_token_ids"] == list(prompt[:-1])
    assert request.num_prompt_tokens == num_tokens - 1
    for begin in range(0, num_tokens - 1, 24):
        prefill.step(request, min(24, num_tokens - 1 - begin))
    request.status, request.output_token_ids = "FINISHED_LENGTH_CAPPED", [7]
    is_held, params = prefill.scheduler.finished(request, is_done=True)
    assert is_held and params is not None
    other = prefill.request("other", prompt_of(40, 5), None)
    prefill.step(other, 40)
    received = decode.load("b", prompt, {**params, "use_first_token": True})
    decode.assert_has(received, prompt[:-1])
    assert received.prompt_token_ids == list(prompt)
    assert decode.scheduler.take_first_tokens() == {}, "the prefill side's token is not the one after the prompt"
    prefill.wait_for("a")


def test_a_prompt_that_vllm_does_not_load_after_all(pair: tuple[Vllm, Vllm]) -> None:
    """vLLM reports a hit inside a block as one before the block. It keeps the hit if the prefill side has no more than that."""
    prefill, decode = pair
    request = prefill.request("a", prompt_of(33), {"do_remote_decode": True})
    prefill.step(request, 32)
    request.status, request.output_token_ids = "FINISHED_LENGTH_CAPPED", [7]
    _, params = prefill.scheduler.finished(request, is_done=True)
    prefill.step()
    wanted = decode.request("b", prompt_of(33), params)
    wait_for(lambda: decode.scheduler.matched(wanted, 0)[0] is not None, "the prompt can be loaded")
    decode.allocate("b", 33)
    decode.scheduler.allocated(wanted, decode.tables["b"], 0)
    prefill.wait_for("a")  # its blocks are not held until decode has generated the answer
    assert wanted.kv_transfer_params["do_remote_prefill"] is False
    assert decode.scheduler.finished(wanted, is_done=True) == (False, None)


@pytest.mark.parametrize("num_tokens", [2, 34])
def test_a_prompt_that_decode_requests_without_a_router(num_tokens: int) -> None:
    """The prefill side gets the tokens that decode requests. It must not leave out one more."""
    asked: list[Transfer] = []

    async def compute(transfer: Transfer) -> None:
        asked.append(transfer)
        await asyncio.get_running_loop().create_future()

    sizes, prompt = (32, 16), prompt_of(num_tokens)
    source = Instance(PREFILL, pool_of=partial(pool_of, sizes=sizes), compute=compute)
    decode = target(source, pool_of=partial(pool_of, sizes=sizes))
    try:
        prefill, receiving = Vllm(source, PREFILL, sizes), Vllm(decode, DECODE, sizes)
        wanted = receiving.request("b", prompt, {"do_remote_prefill": True})
        assert receiving.scheduler.matched(wanted, 0) == (None, False)
        wait_for(lambda: bool(asked), "the prefill side is asked")
        params = {"do_remote_decode": True, "transfer_id": asked[0].engine_request, "is_whole_prompt": True}
        request = prefill.request("a", asked[0].token_ids, params)
        prefill.step(request, num_tokens - 1)
        request.status, request.output_token_ids = "FINISHED_LENGTH_CAPPED", [7]
        assert prefill.scheduler.finished(request, is_done=True)[0]
        prefill.step()
        wait_for(lambda: receiving.scheduler.matched(wanted, 0)[0] is not None, "the prompt can be loaded")
        assert receiving.scheduler.matched(wanted, 0) == (num_tokens - 1, True)
        receiving.allocate("b", num_tokens - 1)
        receiving.scheduler.allocated(wanted, receiving.tables["b"], num_tokens - 1)
        receiving.wait_for("b")
        receiving.assert_has(wanted, prompt[:-1])
        prefill.wait_for("a")
    finally:
        decode.close()
        source.close()


@pytest.mark.parametrize(
    ("changes", "num_tokens", "reason"),
    [
        ({"max_tokens": 9}, 40, "its max_tokens is 9; it must be 1"),
        ({}, 1, "its prompt is one token"),
        ({"prompt_embeds": torch.zeros(1)}, 40, "its prompt has embeddings"),
        ({"skip_reading_prefix_cache": True}, 40, "it is to be computed without any cache"),
    ],
)
def test_requests_that_are_not_handed_over(
    pair: tuple[Vllm, Vllm], changes: dict[str, Any], num_tokens: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, _ = pair
    request = prefill.request("a", prompt_of(num_tokens), {"do_remote_decode": True}, **changes)
    assert request.kv_transfer_params == {"do_remote_decode": False}
    assert request.num_prompt_tokens == num_tokens, "vLLM computes the whole prompt"
    assert reason in "".join(capsys.readouterr())


def test_prompts_that_decode_computes(pair: tuple[Vllm, Vllm]) -> None:
    """vLLM has all of the prompt but its last token, or a state inside a block, which it copies after the next schedule."""
    _, decode = pair
    for name, num_computed in (("all", 99), ("inside", decode.sizes[STATES] // 2)):
        request = decode.request(name, prompt_of(100), {"do_remote_prefill": True, "transfer_id": name})
        assert decode.scheduler.matched(request, num_computed) == (0, False)
        assert request.kv_transfer_params["do_remote_prefill"] is False
