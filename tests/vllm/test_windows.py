"""Sliding windows and chunked local attention: vLLM's hybrid KV cache manager stays on, only windows and chunks travel, and the
tokens are those of one vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import load_file, save_file

from kvferry.demo.kinds import (
    ATTENTION_SHARE,
    HEAD_DIM,
    INTERMEDIATE_SIZE,
    MLP_SHARE,
    NUM_KV_HEADS,
    NUM_LAYERS,
    QUERY_KEY_SCALE,
    WINDOW_TOKENS,
    DemoKind,
    ModelKind,
)
from kvferry.demo.model import make_demo_model
from tests.cluster.open_nodes import open_nodes
from tests.free_port import free_port
from tests.samples import sample
from tests.vllm.answers import MAX_TOKENS, Answer, answer, answers, client
from tests.vllm.commands import vllm_command, vllm_environment
from tests.vllm.instances import assert_nothing_is_left, connector, kvferry_metrics, page
from tests.vllm.our_nodes import all_generated, launch
from tests.vllm.servers import Server, Servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    prefill: Server
    decode: Server
    router: Server
    decode_block: int


@pytest.fixture(scope="module")
def windows_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 whose layers have a window of 64 tokens, except every fourth."""
    return make_demo_model(tmp_path_factory.mktemp("models") / "windows", kind=ModelKind.SLIDING)


@pytest.fixture(scope="module")
def plain(servers: Servers, windows_model: Path) -> Server:
    command = vllm_command(windows_model, args=["--block-size", "32"])
    return servers.start("windows-reference", command, vllm_environment(in_core=True)).wait_ready()


@pytest.fixture(scope="module")
def expected(plain: Server, prompts: Mapping[int, str]) -> dict[int, Answer]:
    found = asyncio.run(answers(plain.url, prompts.values()))
    return dict(zip(prompts, found, strict=True))


CUTS = {"tp2-block32-to-tp1-block64": (2, 32, 64, 1, 64, 72), "tp1-block64-to-tp2-block32": (1, 64, 40, 2, 32, 220)}
"""TP degree, tokens of a block and number of blocks on both sides. All prompts together need more blocks."""


@pytest.fixture(scope="module", params=CUTS.values(), ids=CUTS)
def pair(
    request: pytest.FixtureRequest, vllm_server: Callable[..., Server], route: Callable[..., Server], windows_model: Path
) -> Iterator[Pair]:
    prefill_tp, prefill_block, prefill_blocks, decode_tp, decode_block, decode_blocks = request.param
    scheduler = ["--scheduler-cls", "kvferry.engines.vllm_scheduler.FirstTokenScheduler"]
    prefill = vllm_server(
        windows_model,
        tp=prefill_tp,
        kv_transfer_config=connector("kv_producer"),
        name=f"windows-prefill-tp{prefill_tp}",
        in_core=prefill_tp == 1,
        args=[
            *("--max-num-batched-tokens", "128"),
            *("--block-size", str(prefill_block), "--num-gpu-blocks-override", str(prefill_blocks)),
        ],
    )
    decode = vllm_server(
        windows_model,
        tp=decode_tp,
        kv_transfer_config=connector("kv_consumer", {"join_on_request": True}),
        name=f"windows-decode-tp{decode_tp}",
        in_core=decode_tp == 1,
        args=["--block-size", str(decode_block), "--num-gpu-blocks-override", str(decode_blocks), *scheduler],
    )
    prefill.wait_ready()
    decode.wait_ready()
    router = route(prefill=[prefill], decode=[decode]).wait_ready()
    yield Pair(prefill=prefill, decode=decode, router=router, decode_block=decode_block)
    for server in (router, prefill, decode):
        server.kill()


def moved_bytes(model: Path, lengths: Sequence[int]) -> int:
    """KV of prompts in float32: all tokens of full attention, the last window of the other layers."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    layer_bytes = config["num_key_value_heads"] * config["head_dim"] * 2 * 4
    window = config["sliding_window"]
    num_full = config["layer_types"].count("full_attention")
    num_windows = config["num_hidden_layers"] - num_full
    return sum(layer_bytes * (num_full * length + num_windows * min(length, window)) for length in lengths)


async def test_tokens_and_bytes_of_windows(
    pair: Pair, windows_model: Path, prompts: Mapping[int, str], expected: Mapping[int, Answer]
) -> None:
    before = sample(kvferry_metrics(pair.prefill), "kvferry_transferred_bytes_total")
    found = await answers(pair.router.url, prompts.values())
    assert dict(zip(prompts, found, strict=True)) == expected
    assert_nothing_is_left(pair.prefill, pair.decode)
    await asyncio.sleep(1.0)  # what a rank says of itself is half a second old
    moved = sample(kvferry_metrics(pair.prefill), "kvferry_transferred_bytes_total") - before
    assert moved == moved_bytes(windows_model, list(prompts))
    assert sample(kvferry_metrics(pair.prefill), "kvferry_resends_total") == 0


async def test_prefix_hits(pair: Pair, plain: Server, prompts: Mapping[int, str], expected: Mapping[int, Answer]) -> None:
    """Both sides have prompts in their prefix caches, decode as they were received. Longer prompts begin with them.

    A window's first block was received in part. A hit that includes it would change the tokens.
    """
    few = {length: prompts[length] for length in (64, 384, 513, 600)}  # one by one, so that their blocks stay in the caches
    found = await answers(pair.router.url, few.values(), at_once=1)
    assert dict(zip(few, found, strict=True)) == {length: expected[length] for length in few}
    longer = [f"{prompt} {' '.join(prompt.split()[: length // 7])}" for length, prompt in few.items()]
    before = sample(page(f"{pair.decode.url}/metrics"), "vllm:prefix_cache_hits_total")
    reference = await answers(plain.url, longer)
    for _ in range(2):
        assert await answers(pair.router.url, longer, at_once=1) == reference
    if pair.decode_block < 64:  # of prompts longer than the window, decode has no whole window
        assert sample(page(f"{pair.decode.url}/metrics"), "vllm:prefix_cache_hits_total") > before
    assert_nothing_is_left(pair.prefill, pair.decode)


async def test_the_prefill_server_is_killed(pair: Pair, prompts: Mapping[int, str], expected: Mapping[int, Answer]) -> None:
    """Decode computes prompts whose KV did not arrive, with all the blocks that windows need for that."""
    lengths = list(prompts)[-8:]
    asking = asyncio.create_task(answers(pair.router.url, [prompts[length] for length in lengths]))
    await asyncio.sleep(0.3)
    pair.prefill.kill()
    async with asyncio.timeout(100):
        with contextlib.suppress(openai.APIStatusError):  # the router reports requests that decode did not have yet
            found = await asking
            assert dict(zip(lengths, found, strict=True)) == {length: expected[length] for length in lengths}
    assert_nothing_is_left(pair.decode)
    alone = await answers(pair.decode.url, [prompts[length] for length in lengths])
    assert alone == [expected[length] for length in lengths]


async def test_windows_between_vllm_and_our_nodes(
    vllm_server: Callable[..., Server],
    windows_model: Path,
    prompts: Mapping[int, str],
    expected: Mapping[int, Answer],
    tmp_path: Path,
) -> None:
    with open_nodes(tmp_path) as nodes, free_port() as port, free_port() as address:
        settings = {"api_url": f"http://127.0.0.1:{port}", "server": {"port": address}, "join_on_request": True}
        server = vllm_server(
            windows_model,
            kv_transfer_config=connector("kv_both", settings),
            name="windows-with-nodes",
            in_core=True,
            port=port,
            args=["--block-size", "32"],
        )
        prefill = launch(nodes, "prefill", windows_model, limits__max_step_tokens=128, chunk__chunk_tokens=64)
        decode = launch(nodes, "decode", windows_model, f"127.0.0.1:{address}")
        server.wait_ready()
        await nodes.until_started(prefill, decode)
        generated = await all_generated(decode.address, list(prompts.values()), max_tokens=MAX_TOKENS)
        assert {length: made for length, (made, _) in zip(prompts, generated, strict=True)} == expected
        params = {"do_remote_prefill": True, "remote_address": prefill.address}
        async with client(server.url) as asking:
            extra = {"kv_transfer_params": params, "cache_salt": "nodes"}
            found = await asyncio.gather(*(answer(asking, prompt, extra=extra) for prompt in prompts.values()))
        assert dict(zip(prompts, found, strict=True)) == expected
        assert_nothing_is_left(server)


@pytest.fixture(scope="module")
def wide_model(windows_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 4 whose full attention has heads twice as long, so vLLM gives its block table blocks half as long."""
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("models") / "wide"
    shutil.copytree(windows_model, directory, ignore=shutil.ignore_patterns("config.json", "model.safetensors"))
    config = transformers.Gemma4TextConfig(
        vocab_size=768,
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        hidden_size_per_layer_input=0,
        max_position_embeddings=1024,
        sliding_window=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(1)
    transformers.Gemma4ForCausalLM(config).float().eval().save_pretrained(directory)
    return directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One vLLM, and a pair with the same model."""

    plain: Server
    prefill: Server
    decode: Server
    router: Server

    async def moved_bytes(self, prompts: Mapping[int, str]) -> float:
        """Return the bytes that the pair transfers for the prompts, after it gave the tokens of the one vLLM."""
        expected = await answers(self.plain.url, prompts.values())
        assert len({one.token_ids for one in expected}) == len(expected), "a prompt's answer depends on the prompt"
        assert await answers(self.router.url, prompts.values()) == expected
        assert_nothing_is_left(self.prefill, self.decode)
        await asyncio.sleep(1.0)  # what a rank says of itself is half a second old
        return sample(kvferry_metrics(self.prefill), "kvferry_transferred_bytes_total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    tp: int = 1
    pp: int = 1
    block_size: int


Compare = Callable[[Path, Side, Side], Compared]


@pytest.fixture
def compare(vllm_server: Callable[..., Server], route: Callable[..., Server]) -> Iterator[Compare]:
    """Starts the servers for a model."""
    started: list[Server] = []

    def start(name: str, model: Path, side: Side, transfer: Mapping[str, Any] | None) -> Server:
        args = ["--max-num-batched-tokens", "128", "--block-size", str(side.block_size)]
        environment = {}
        if side.pp > 1:
            # On a CPU, only the warm-up of vLLM 0.32 makes the buffers between stages. It runs unless execution is eager.
            args += ["--pipeline-parallel-size", str(side.pp), "--no-enforce-eager"]
            environment["VLLM_USE_AOT_COMPILE"] = "0"  # TORCHDYNAMO_DISABLE keeps the execution eager
        started.append(
            vllm_server(
                model,
                tp=side.tp,
                kv_transfer_config=transfer,
                name=f"{model.name}-{name}",
                in_core=side.tp * side.pp == 1,
                environment=environment,
                args=args,
            )
        )
        return started[-1]

    def compared(model: Path, prefill_side: Side, decode_side: Side) -> Compared:
        plain = start("reference", model, Side(block_size=32), None)
        prefill = start("prefill", model, prefill_side, connector("kv_producer"))
        decode = start("decode", model, decode_side, connector("kv_consumer", {"join_on_request": True}))
        for server in (plain, prefill, decode):
            server.wait_ready()
        started.append(route(prefill=[prefill], decode=[decode], name=f"{model.name}-route").wait_ready())
        return Compared(plain=plain, prefill=prefill, decode=decode, router=started[-1])

    yield compared
    for server in started:
        server.kill()


async def test_block_tables_with_blocks_of_different_sizes(
    compare: Compare, wide_model: Path, prompts: Mapping[int, str]
) -> None:
    found = compare(wide_model, Side(block_size=64), Side(tp=2, block_size=32))
    assert await found.moved_bytes(prompts) == sum(2 * 4 * 2 * (64 * length + 5 * 32 * min(length, 64)) for length in prompts)


@pytest.mark.parametrize("is_staged", [(True, False), (False, True)], ids=["pp2-to-pp1", "pp1-to-pp2"])
async def test_pipeline_stages(
    compare: Compare, windows_model: Path, prompts: Mapping[int, str], is_staged: tuple[bool, bool]
) -> None:
    """Each of the four block tables has layers of both stages, and the numbers of stages differ."""
    prefill, decode = (Side(pp=1 + staged, block_size=64 if staged else 32) for staged in is_staged)
    found = compare(windows_model, prefill, decode)
    assert await found.moved_bytes(prompts) == moved_bytes(windows_model, list(prompts))


SIDES = {
    "tp2-block32-to-tp1-block64": (Side(tp=2, block_size=32), Side(block_size=64)),
    "tp1-block64-to-tp2-block32": (Side(block_size=64), Side(tp=2, block_size=32)),
}

SINKS = DemoKind(
    family="GptOss",
    config_class="GptOssConfig",
    config={
        "hidden_size": 384,
        "sliding_window": WINDOW_TOKENS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    },
    gains={"q_proj": QUERY_KEY_SCALE, "k_proj": QUERY_KEY_SCALE, "o_proj": ATTENTION_SHARE},
)


@pytest.fixture(scope="module")
def sinks_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-OSS with attention sinks, whose every second layer has a window of 64 tokens."""
    model = make_demo_model(tmp_path_factory.mktemp("models") / "sinks", kind=SINKS)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor.zero_()  # those of the recipe outweigh the prompt
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize(("prefill", "decode"), SIDES.values(), ids=SIDES)
async def test_attention_sinks(
    compare: Compare, sinks_model: Path, prompts: Mapping[int, str], prefill: Side, decode: Side
) -> None:
    """Sinks are weights, so no KV is moved for them."""
    found = compare(sinks_model, prefill, decode)
    assert await found.moved_bytes(prompts) == moved_bytes(sinks_model, list(prompts))


CHUNK_TOKENS = 64
LLAMA4 = DemoKind(
    family="Llama4",
    config_class="Llama4TextConfig",
    config={
        "attention_chunk_size": CHUNK_TOKENS,
        "no_rope_layer_interval": 4,  # layers with full attention
        "interleave_moe_layer_step": NUM_LAYERS + 1,  # no layer with experts
        "intermediate_size_mlp": INTERMEDIATE_SIZE,
        "use_qk_norm": False,
    },
    gains={"q_proj": QUERY_KEY_SCALE, "k_proj": QUERY_KEY_SCALE, "o_proj": ATTENTION_SHARE, "down_proj": MLP_SHARE},
)


@pytest.fixture(scope="module")
def chunks_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama 4 whose layers attend in chunks of 64 tokens, except every fourth."""
    return make_demo_model(tmp_path_factory.mktemp("models") / "chunks", kind=LLAMA4)


@pytest.mark.parametrize(("prefill", "decode"), SIDES.values(), ids=SIDES)
async def test_chunked_local_attention(
    compare: Compare, chunks_model: Path, prompts: Mapping[int, str], prefill: Side, decode: Side
) -> None:
    """Prompts of 64, 128, 256 and 384 tokens end with a chunk, whose blocks vLLM frees before decode has them.

    The prefix caches of both sides contain whole chunks, so longer prompts begin with hits.
    """
    found = compare(chunks_model, prefill, decode)
    num_full = NUM_LAYERS // 4
    assert await found.moved_bytes(prompts) == sum(
        2 * NUM_KV_HEADS * HEAD_DIM * 4 * (num_full * length + (NUM_LAYERS - num_full) * ((length - 1) % CHUNK_TOKENS + 1))
        for length in prompts
    )
    hits_before = sample(page(f"{found.decode.url}/metrics"), "vllm:prefix_cache_hits_total")
    longer = [f"{prompts[length]} {' '.join(prompts[length].split()[: length // 7])}" for length in (64, 384, 513, 600)]
    assert await answers(found.router.url, longer, at_once=1) == await answers(found.plain.url, longer)
    assert sample(page(f"{found.decode.url}/metrics"), "vllm:prefix_cache_hits_total") > hits_before
    assert_nothing_is_left(found.prefill, found.decode)
