"""Recurrent states: each prompt moves one state per layer and the KV of full attention, and the tokens are those of one vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvferry.demo.kinds import HEAD_DIM, KINDS, NUM_KV_HEADS, NUM_LAYERS, QUERY_KEY_SCALE, DemoKind, ModelKind
from kvferry.demo.model import make_demo_model
from tests.samples import sample
from tests.vllm.answers import Answer, answers
from tests.vllm.commands import vllm_command, vllm_environment
from tests.vllm.instances import assert_nothing_is_left, connector, kvferry_metrics, page
from tests.vllm.servers import Server, Servers

MAMBA2 = DemoKind(
    family="GraniteMoeHybrid",
    config_class="GraniteMoeHybridConfig",
    config={
        "hidden_size": 384,
        "num_attention_heads": NUM_KV_HEADS,
        "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(8)],
        "shared_intermediate_size": 576,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "attention_multiplier": 32**-0.5,
        "position_embedding_type": "rope",
        "mamba_n_heads": NUM_KV_HEADS,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,  # every rank has a copy of it
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": True,  # vLLM 0.32 needs it if ranks have copies of the group
    },
    gains={"q_proj": QUERY_KEY_SCALE, "k_proj": QUERY_KEY_SCALE, "o_proj": 1.0, "out_proj": 1.0},
    grown=("o_proj", "out_proj"),
)
"""A Granite 4 with Mamba-2 in three of four layers."""

DELTA_NET = replace(
    KINDS[ModelKind.HYBRID],
    config={
        **KINDS[ModelKind.HYBRID].config,
        "hidden_size": 384,
        "num_attention_heads": NUM_KV_HEADS,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,  # vLLM's kernel on CPUs has this one
        "linear_value_head_dim": 128,
        "mlp_only_layers": list(range(NUM_LAYERS - 1)),  # vLLM needs a layer with experts
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
)
"""A Qwen3-Next with gated delta nets in three of four layers."""

ONE_AT_A_TIME = ["--max-num-seqs", "1", "--max-num-batched-tokens", "128"]
"""With two prompts in a step, or a step that ends inside a chunk, Mamba-2 of vLLM 0.32 on a CPU fails with an IndexError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    prefill: Server
    decode: Server
    router: Server


@pytest.fixture(scope="module")
def mamba2_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "mamba2", kind=MAMBA2)


@pytest.fixture(scope="module")
def plain(servers: Servers, mamba2_model: Path) -> Server:
    command = vllm_command(mamba2_model, args=ONE_AT_A_TIME)
    return servers.start("mamba2-reference", command, vllm_environment(in_core=True)).wait_ready()


@pytest.fixture(scope="module")
def expected(plain: Server, prompts: Mapping[int, str]) -> dict[int, Answer]:
    found = asyncio.run(answers(plain.url, prompts.values()))
    return dict(zip(prompts, found, strict=True))


CUTS = {"tp2-to-tp1": (2, 1, True), "tp1-to-tp2-without-prefix-cache": (1, 2, False)}
"""TP degree of both sides, and whether they keep states for later prompts: vLLM then has a block table of another form."""


@pytest.fixture(scope="module", params=CUTS.values(), ids=CUTS)
def pair(
    request: pytest.FixtureRequest, vllm_server: Callable[..., Server], route: Callable[..., Server], mamba2_model: Path
) -> Iterator[Pair]:
    prefill_tp, decode_tp, has_prefix_cache = request.param
    args = [] if has_prefix_cache else ["--no-enable-prefix-caching"]
    prefill = vllm_server(
        mamba2_model,
        tp=prefill_tp,
        kv_transfer_config=connector("kv_producer"),
        name=f"mamba2-prefill-tp{prefill_tp}",
        in_core=prefill_tp == 1,
        args=[*ONE_AT_A_TIME, *args],
    )
    decode = vllm_server(
        mamba2_model,
        tp=decode_tp,
        kv_transfer_config=connector("kv_consumer", {"join_on_request": True}),
        name=f"mamba2-decode-tp{decode_tp}",
        in_core=decode_tp == 1,
        args=args,
    )
    prefill.wait_ready()
    decode.wait_ready()
    router = route(prefill=[prefill], decode=[decode]).wait_ready()
    yield Pair(prefill=prefill, decode=decode, router=router)
    for server in (router, prefill, decode):
        server.kill()


def moved_bytes(model: Path, lengths: Sequence[int], ranks_with_a_group: int) -> int:
    """Of prompts in float32: full attention of all tokens but the last, which decode computes, and a state per other layer.

    Args:
        ranks_with_a_group: Decode ranks, each of which has a copy of the only group of B and C.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    token = 2 * config["num_key_value_heads"] * (config["hidden_size"] // config["num_attention_heads"])
    channels = config["mamba_n_heads"] * config["mamba_d_head"]
    groups = 2 * config["mamba_d_state"] * ranks_with_a_group
    state = channels * config["mamba_d_state"] + (channels + groups) * (config["mamba_d_conv"] - 1)
    num_full = config["layer_types"].count("full_attention")
    num_states = len(config["layer_types"]) - num_full
    return 4 * sum(num_full * token * (length - 1) + num_states * state for length in lengths)


async def test_tokens_and_bytes_of_states(
    pair: Pair, mamba2_model: Path, prompts: Mapping[int, str], expected: Mapping[int, Answer]
) -> None:
    assert len({one.token_ids for one in expected.values()}) == len(expected), "a prompt's answer depends on the prompt"
    before = sample(kvferry_metrics(pair.prefill), "kvferry_transferred_bytes_total")
    found = await answers(pair.router.url, prompts.values())
    assert dict(zip(prompts, found, strict=True)) == expected
    assert_nothing_is_left(pair.prefill, pair.decode)
    await asyncio.sleep(1.0)  # what a rank says of itself is half a second old
    moved = sample(kvferry_metrics(pair.prefill), "kvferry_transferred_bytes_total") - before
    decode_tp = 2 if "tp2" in pair.decode.name else 1
    assert moved == moved_bytes(mamba2_model, list(prompts), decode_tp)
    assert sample(kvferry_metrics(pair.prefill), "kvferry_resends_total") == 0


async def test_prompts_that_begin_with_earlier_ones(
    pair: Pair, plain: Server, prompts: Mapping[int, str], expected: Mapping[int, Answer]
) -> None:
    """With a prefix cache, both sides continue states of earlier prompts, decode those that it received."""
    few = {length: prompts[length] for length in (129, 257, 300, 384)}
    found = await answers(pair.router.url, few.values(), at_once=1)
    assert dict(zip(few, found, strict=True)) == {length: expected[length] for length in few}
    longer = [f"{prompt} {' '.join(prompt.split()[: length // 7])}" for length, prompt in few.items()]
    reference = await answers(plain.url, longer, at_once=1)
    for _ in range(2):
        assert await answers(pair.router.url, longer, at_once=1) == reference
    assert_nothing_is_left(pair.prefill, pair.decode)


async def test_requests_that_decode_computes(pair: Pair, prompts: Mapping[int, str], expected: Mapping[int, Answer]) -> None:
    """Decode alone, and the prefill server alone, answer as one vLLM."""
    few = (10, 129, 257)
    for server in (pair.decode, pair.prefill):
        assert await answers(server.url, [prompts[length] for length in few], at_once=1) == [expected[length] for length in few]
    assert sample(page(f"{pair.decode.url}/metrics"), "vllm:num_requests_running") == 0


@pytest.mark.skipif(
    "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="ascii"),
    reason="vLLM packs blocks in bfloat16 for AMX on this CPU, which kvferry cannot read",
)
async def test_gated_delta_nets(
    vllm_server: Callable[..., Server], route: Callable[..., Server], tmp_path: Path, prompts: Mapping[int, str]
) -> None:
    """In bfloat16, the only type of vLLM's kernel on CPUs, so a prompt rounds differently if its steps are others.

    These prompts end a token behind a step of 128, and one vLLM computes that token alone, as decode does.
    """
    model = make_demo_model(tmp_path / "delta-net", kind=DELTA_NET)
    lengths = (129, 257, 513)

    def start(name: str, transfer: Mapping[str, object] | None) -> Server:
        args = ["--dtype", "bfloat16", "--max-num-batched-tokens", "128", "--no-enable-prefix-caching"]
        return vllm_server(model, kv_transfer_config=transfer, name=f"delta-net-{name}", in_core=True, args=args)

    plain = start("reference", None)
    prefill = start("prefill", connector("kv_producer"))
    decode = start("decode", connector("kv_consumer", {"join_on_request": True}))
    for server in (plain, prefill, decode):
        server.wait_ready()
    router = route(prefill=[prefill], decode=[decode], name="delta-net-route").wait_ready()
    asked = [prompts[length] for length in lengths]
    expected = await answers(plain.url, asked, at_once=1)
    assert len({one.token_ids for one in expected}) == len(expected), "a prompt's answer depends on the prompt"
    assert await answers(router.url, asked, at_once=1) == expected
    await asyncio.sleep(1.0)  # what a rank says of itself is half a second old
    state = 8 * 128 * 128 * 4 + (2 * 4 + 8) * 128 * 3 * 2
    token = 2 * NUM_KV_HEADS * HEAD_DIM * 2
    moved = sample(kvferry_metrics(prefill), "kvferry_transferred_bytes_total")
    assert moved == sum(6 * state + 2 * token * (length - 1) for length in lengths)
    assert_nothing_is_left(prefill, decode)
