"""The embedded engine on a real GPU: decode steps replayed and launched, against the same engine on the CPU; and its memory."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.loading import load_engine
from embedded_engine.model_files import read_model_files
from node_runtime.rank_engine import rank_memory
from tests.embedded_engine.decode_scenario import PROMPTS, tokens_of_a_life
from tests.embedded_engine.families import FAMILIES
from tests.embedded_engine.steps import Directory, Prompts, bind_pages, pages_for, prefill_all
from tests.gpu.busy import occupy
from tests.gpu.small_engines import make_engine, prompts_of
from tests.runtime.instances import decode_config
from transfer.engine_types import DecodeItem, PrefillItem
from transfer.layer_groups import layer_groups
from transfer.layout import DType, Shard
from transfer.pool.kv_pool import KVPool

pytestmark = pytest.mark.timeout(600)  # the first of each shape compiles its kernels

GIB = 1 << 30
NUM_STEPS = 8
CAPTURED = (2, 4)
MODELS = ("llama", *FAMILIES)
WITH_EXPERTS = ("gpt_oss", "deepseek_v2", "deepseek_v3_moe", "mixtral", "qwen3_moe", "qwen3_next_moe")
ARCHITECTURES_OF_GROUPED_KERNEL = (9, 10)

Record = Callable[[str, object], None]


def sizes_that_are_captured(name: str, dtype: DType) -> tuple[int, ...]:
    """What an engine told to capture `CAPTURED` must have captured: all of it, but for experts that torch sends round the host.

    transformers computes experts by `torch.nn.functional.grouped_mm`. That has a kernel for bfloat16 on GPUs of capability
    9 and 10; for every other type or GPU it copies the rows of each expert to the host (ATen/native/GroupedMMUtils.h).
    """
    has_kernel = dtype is DType.BFLOAT16 and torch.cuda.get_device_capability()[0] in ARCHITECTURES_OF_GROUPED_KERNEL
    return CAPTURED if name not in WITH_EXPERTS or has_kernel else ()


@pytest.fixture(scope="module", autouse=True)
def exact_convolutions() -> None:
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return prompts_of(PROMPTS.values())


@pytest.mark.parametrize("name", MODELS)
def test_replayed_launched_and_on_the_cpu_the_tokens_are_the_same(
    model: Directory, prompts: Prompts, name: str, record_property: Record
) -> None:
    """In float32, with batches that grow, shrink and are padded, windows that move, and pages that are given on."""
    directory = model(name)
    on_cpu = tokens_of_a_life(make_engine(directory, "cpu"), prompts, NUM_STEPS)
    launched = tokens_of_a_life(make_engine(directory, "cuda"), prompts, NUM_STEPS)
    assert launched == on_cpu
    engine = make_engine(directory, "cuda", captured=CAPTURED)
    record_property("captured", f"{name} float32: {engine.captured_batch_sizes}")
    assert tokens_of_a_life(engine, prompts, NUM_STEPS) == on_cpu
    assert engine.captured_batch_sizes == sizes_that_are_captured(name, DType.FLOAT32)


@pytest.mark.parametrize("name", MODELS)
def test_a_replayed_step_of_half_precision_computes_what_a_launched_one_does(
    model: Directory, prompts: Prompts, name: str, record_property: Record
) -> None:
    assert_replayed_as_launched(model(name), prompts, sizes_that_are_captured(name, DType.BFLOAT16), record_property)


def assert_replayed_as_launched(directory: Path, prompts: Prompts, captured: tuple[int, ...], record_property: Record) -> None:
    """The logits of steps of captured sizes, in half precision: the kernels are the same, so nearly all bits are."""
    logits: dict[str, list[Tensor]] = {"launched": [], "replayed": []}
    for way, wanted in (("launched", ()), ("replayed", CAPTURED)):
        engine = make_engine(directory, "cuda", captured=wanted, dtype=DType.BFLOAT16)
        if wanted:
            record_property("captured", f"{directory.name} bfloat16: {engine.captured_batch_sizes}")
        lengths = {key: PROMPTS[key] for key in ("a", "b", "c", "d")}
        tables = {key: tables_of(engine.pool, index) for index, key in enumerate(lengths)}
        for key, length in lengths.items():
            engine.prefill(
                [PrefillItem(request_id=key, token_ids=prompts[length], first_token=0, page_tables=tables[key], is_last=True)]
            )
        items = [
            DecodeItem(request_id=key, token_id=7, position=length, page_tables=tables[key]) for key, length in lengths.items()
        ]
        logits[way] = [logits_of(engine, step_items).clone() for step_items in (items[:2], items)]
    for launched, replayed in zip(logits["launched"], logits["replayed"], strict=True):
        assert bool(launched.isfinite().all()) and float(launched.std()) > 0.1
        torch.testing.assert_close(replayed, launched)
    assert engine.captured_batch_sizes == captured


def tables_of(pool: KVPool, index: int) -> tuple[tuple[int, ...], ...]:
    """Page tables of the request `index`, of as many tokens as fit a fourth of each group."""
    quarters = [count // 4 for count in pool.num_pages]
    return tuple(tuple(range(index * quarter, (index + 1) * quarter)) for quarter in quarters)


def logits_of(engine: EmbeddedEngine, items: Sequence[DecodeItem]) -> Tensor:
    logits = engine.logits(engine.decode_batch(items))
    assert logits is not None
    return logits


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Fail if the block waits for the device, which is busy meanwhile.

    The block must queue less than 1,024 kernels. With that many in its queue, CUDA lets every launch wait.
    """
    torch.cuda.synchronize()
    occupy(400_000_000)
    is_idle = torch.cuda.Event()
    is_idle.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not is_idle.query()


@pytest.mark.parametrize("captured", [(), CAPTURED], ids=["launched", "replayed"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "qwen3_next"])
def test_a_step_waits_for_nothing(model: Directory, prompts: Prompts, name: str, captured: tuple[int, ...]) -> None:
    engine = make_engine(model(name), "cuda", captured=captured)
    tables = tables_of(engine.pool, 0)
    item = DecodeItem(request_id="a", token_id=7, position=17, page_tables=tables)
    unread = replace(item, token_id=0, position=18, is_unread=True)
    first = [PrefillItem(request_id="a", token_ids=prompts[17], first_token=0, page_tables=tables, is_last=True)]
    engine.prefill(first), engine.decode([item])  # whatever is loaded and compiled the first time
    for read in [engine.begin_decode([one]) for one in (item, unread)]:
        read()
    with waiting_is_an_error():
        # The chunked delta rule of transformers does as it likes; a prefill step of attention alone waits for nothing either.
        prefilled = None if name == "qwen3_next" else engine.forward_batch(engine.prefill_batch(first))
        output = engine.forward_batch(engine.decode_batch([item]))
        assert output.copied is not None and not output.copied.query()
    with waiting_is_an_error():
        reads = [engine.begin_decode([one]) for one in (item, unread)]
    assert output.next_tokens.is_cuda and output.next_tokens_host.is_pinned()
    tokens = output.tokens()
    assert tokens == {"a": int(output.next_tokens)} == engine.decode([item]) or name == "qwen3_next"
    assert prefilled is None or prefilled.tokens() == engine.prefill(first)
    if name != "qwen3_next":  # its state is one token further after each step
        queued = [read() for read in reads]
        assert queued == [tokens, engine.decode([replace(unread, token_id=tokens["a"], is_unread=False)])]


LONG_REQUEST_CASES = [
    *((name, DType.FLOAT32, 2e-3) for name in ("llama", "gemma3", "gpt_oss", "qwen2", "deepseek_v3")),
    *((name, DType.BFLOAT16, 3e-2) for name in ("glm", "gemma3", "qwen2", "deepseek_v3")),
]
"""Family, what it computes in, and by how much of their norm the logits may differ between two right ways to compute them.

In bfloat16 the rounding of three layers makes up to 0.016, and a window that is a token too long or short makes 0.1 and more.
"""


@pytest.mark.parametrize(("name", "dtype", "tolerance"), LONG_REQUEST_CASES)
def test_a_longer_request_than_a_block_of_queries(model: Directory, name: str, dtype: DType, tolerance: float) -> None:
    """Prefill in blocks over a long context, on both devices: masks, windows and shared heads of every kernel that is chosen."""
    generator = torch.Generator().manual_seed(4)
    prompt = tuple(torch.randint(3, 240, (300,), generator=generator).tolist())
    on_cpu, on_gpu = (logits_behind(prompt, model(name), device, dtype) for device in ("cpu", "cuda"))
    assert float((on_gpu - on_cpu).norm() / on_cpu.norm()) < tolerance


def logits_behind(prompt: tuple[int, ...], directory: Path, device: str, dtype: DType) -> Tensor:
    """Of the last token of a request that comes in two chunks."""
    files = read_model_files(directory)
    num_pages = pages_for(layer_groups(files.layout()), 100)
    engine = EmbeddedEngine(files, shard=Shard(page_size=4), num_pages=num_pages, device=device, dtype=dtype)
    tables = tuple([list(range(75))] * len(engine.pool.groups))
    for begin, end in ((0, 170), (170, len(prompt))):
        item = PrefillItem(
            request_id="a", token_ids=prompt[begin:end], first_token=begin, page_tables=tables, is_last=end == len(prompt)
        )
        logits = engine.logits(engine.prefill_batch([item]))
    assert logits is not None
    return logits.float().cpu()


def llama_8b(folder: Path, num_layers: int) -> Path:
    """config.json of a Llama of the 8B's shape with few layers and a smaller vocabulary."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": num_layers, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_planned_memory_is_what_is_taken(tmp_path: Path, record_property: Record) -> None:
    """From a node's settings to an engine with graphs: every line that is allocated comes out within 1 % of the plan."""
    gc.collect()  # the engines of the tests before
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    settings = {"max_running_requests": 16, "max_seq_len": 4096}
    ring_bytes = 64 << 20
    config = decode_config(
        llama_8b(tmp_path / "model", num_layers=2),
        device="cuda",
        dummy_weights=True,
        limits=settings,
        ring={"capacity_bytes": ring_bytes},
    )
    engine = load_engine(config, rank=0, rendezvous=tmp_path / "unused")
    ring = torch.empty(ring_bytes + config.transport.probe_bytes, dtype=torch.uint8, device="cuda")  # as a rank takes it
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    plan = engine.memory_plan
    assert plan is not None and engine.captured_batch_sizes == (1, 2, 4, 8, 16)
    memory = rank_memory(engine, {"ring": ring.numel()})
    allocated = torch.cuda.memory_allocated()
    lines = ("weights", "pool_full", "page_tables", "ring")
    shown = {line: (plan.planned_bytes(line), memory.real[line]) for line in (*lines, "cuda_graphs", "free")}
    for line, (planned, real) in shown.items():
        print(f"{line}: planned {planned / GIB:.4f} GiB, real {real / GIB:.4f} GiB")
        record_property(line, f"{planned} {real}")
    print(f"allocated {allocated / GIB:.4f} GiB")
    for line in lines:
        assert memory.real[line] == pytest.approx(plan.planned_bytes(line), rel=0.01), line
    assert plan.planned_bytes("pool_full") > 50 * GIB
    assert allocated == pytest.approx(sum(plan.planned_bytes(line) for line in lines), rel=0.01)
    assert memory.real["cuda_graphs"] < plan.reserved_bytes
    assert memory.real["free"] == pytest.approx(plan.planned_bytes("free"), rel=0.1)
    tables = bind_pages(engine.pool.num_pages[0], engine.pool.page_size, {"a": 300, "b": 40})
    first = prefill_all(engine, {"a": tuple(range(3, 290)), "b": tuple(range(3, 20))}, tables)
    items = [
        DecodeItem(request_id=name, token_id=first[name], position=position, page_tables=(tables[name],))
        for name, position in (("a", 287), ("b", 17))
    ]
    assert set(engine.decode(items)) == {"a", "b"}
