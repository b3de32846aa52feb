"""Prefill of long prompts: KV in host memory or on the device, full attention or block-sparse.

    python -m bench.sparse_prefill [--parts prefill kernel needle memory] [--tokens 131072] [--chunk 8192] [--layers 32] [--quick]

- prefill: A model with the shape of Llama 3 8B and random weights computes one prompt in all four ways, in the same chunks.
  "link" is a plain copy from pinned memory of as many bytes as the steps with full attention read and write. The target in
  host memory is 1.15 times the time on the device, or the time of the link, whichever is longer. Random weights have no
  structure, so the density is about the threshold.
- kernel: Block-sparse attention over one prompt against torch's flash attention. The target is 0.7 / density of its speed.
- needle: Whether the model of `bench.needle_model` finds the needle, at several depths, by threshold. No antidiagonal of an even
  stride contains two tokens at an even distance, and this model looks for exactly one distance: it is a worst case.
- memory: The seed's case, a model with the shape of GLM-4-9B and 1,048,576 tokens on a device of 24 GB, with KV in host memory:
  the declared memory against the allocated, and the peak of a step at the beginning and at the end of the context.

Without a GPU all sizes are small.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.llama_engine import HEAD_DIM, KV_HEADS, PAGE_SIZE, QUERY_HEADS, llama_engine
from bench.needle_model import NUM_TOKENS, make_needle_model
from bench.timing import Report, Row, argument_parser
from embedded_engine.engine import EmbeddedEngine
from embedded_engine.kernels.block_sparse_arguments import KeySpan, RunningState, Selection
from embedded_engine.loading import load_engine
from embedded_engine.sparse_prefill import sparse_kernels
from planner.workspace import XAttention
from transfer.config import PrefillNodeConfig
from transfer.engine_types import PrefillItem
from transfer.layer_groups import NO_PAGE
from transfer.layout import Shard
from transfer.pool.host_pool import HostPool

PARTS: Final = ("prefill", "kernel", "needle", "memory")
BUFFER_BYTES: Final = 64 << 20
LINK_BYTES: Final = 1 << 30
TARGET: Final = 1.15
THRESHOLD: Final = 0.2
KERNEL_THRESHOLDS: Final = (0.1, 0.2, 0.3)
NEEDLE_THRESHOLDS: Final = (1.0, 0.95, 0.9, 0.8, 0.5)
DEPTHS: Final = (0.05, 0.25, 0.5, 0.75, 0.95)

_GLM = {
    "architectures": ["GlmForCausalLM"], "model_type": "glm", "vocab_size": 151_552, "hidden_size": 4096,
    "intermediate_size": 13_696, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 1 << 20, "partial_rotary_factor": 0.5, "attention_bias": True, "rms_norm_eps": 1.5625e-07,
    "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "bfloat16", "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_TINY_GLM = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1 << 14, "dtype": "float32",
}  # fmt: skip


def item_of(tokens: Sequence[int], first_token: int, *, in_host: bool, is_last: bool) -> PrefillItem:
    """Return a chunk of the only request, whose page i is the pool's page i."""
    pages = tuple(range(-(-(first_token + len(tokens)) // PAGE_SIZE)))
    return PrefillItem(
        request_id="a",
        token_ids=tuple(tokens),
        first_token=first_token,
        page_tables=((NO_PAGE,) * len(pages) if in_host else pages,),
        host_tables=(pages,) if in_host else (),
        is_last=is_last,
    )


def prefill(engine: EmbeddedEngine, tokens: Sequence[int], chunk_tokens: int, *, in_host: bool) -> Tensor:
    """Compute a prompt. Return the logits of its last token in float32."""
    logits = None
    for begin in range(0, len(tokens), chunk_tokens):
        part = tokens[begin : begin + chunk_tokens]
        item = item_of(part, begin, in_host=in_host, is_last=begin + len(part) == len(tokens))
        logits = engine.logits(engine.prefill_batch([item]))
    assert logits is not None
    found: Tensor = logits[0].float()
    synchronize(found.device)
    return found.cpu()


def synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def engine_of(
    device: str, *, num_layers: int, num_tokens: int, chunk_tokens: int, in_host: bool, policy: XAttention | None
) -> Iterator[EmbeddedEngine]:
    num_pages = -(-num_tokens // PAGE_SIZE)
    engine = llama_engine(
        device,
        num_layers=num_layers,
        num_pages=1 if in_host else num_pages,
        max_seq_len=num_tokens + 1,
        max_running_requests=None,
        is_tiny=device == "cpu",
        sparse_prefill=policy,
        chunk_tokens=chunk_tokens,
    )
    with closing(engine, num_pages if in_host else 0):
        yield engine


@contextmanager
def closing(engine: EmbeddedEngine, num_host_pages: int) -> Iterator[None]:
    """Give the engine host pages, and release everything in the end."""
    host = None
    try:
        if num_host_pages:
            host = HostPool(engine.pool, num_pages=[num_host_pages])
            engine.use_host_pool(host, block_bytes=BUFFER_BYTES)
        yield
    finally:
        engine.close()
        if host is not None:
            host.close()
        engine.release_pool()
        gc.collect()


def link_seconds(device: str, num_bytes: int) -> float:
    """Return the seconds of a plain copy of `num_bytes` from pinned host memory to the device."""
    size = min(LINK_BYTES, num_bytes)
    source = torch.ones(size, dtype=torch.uint8, pin_memory=device != "cpu")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    samples = []
    for _ in range(4):
        begun_s = time.perf_counter()
        target.copy_(source)
        samples.append(time.perf_counter() - begun_s)
    return min(samples) * num_bytes / size


def measure_prefill(
    report: Report, device: str, *, num_tokens: int, chunk_tokens: int, num_layers: int, repetitions: int
) -> None:
    policy = XAttention(threshold=THRESHOLD)
    tokens = [(position * 37 + 11) % 500 for position in range(num_tokens)]
    case = f"{num_tokens} tokens"
    seconds: dict[tuple[bool, bool], list[float]] = {}
    logits: dict[tuple[bool, bool], Tensor] = {}
    facts: dict[str, object] = {}
    token_bytes = 0
    for is_sparse in (False, True):
        for in_host in (False, True):
            name = f"{'sparse' if is_sparse else 'full'}, {'in host memory' if in_host else 'on the device'}"
            with engine_of(
                device,
                num_layers=num_layers,
                num_tokens=num_tokens,
                chunk_tokens=chunk_tokens,
                in_host=in_host,
                policy=policy if is_sparse else None,
            ) as engine:
                token_bytes = engine.pool.groups[0].page_bytes(engine.pool.layout, engine.pool.shard) // PAGE_SIZE
                prefill(engine, tokens[: 2 * chunk_tokens], chunk_tokens, in_host=in_host)  # compiles kernels
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated() if device == "cuda" else 0
                counted = engine.prefill_counts
                found = []
                for _ in range(repetitions):
                    begun_s = time.perf_counter()
                    logits[is_sparse, in_host] = prefill(engine, tokens, chunk_tokens, in_host=in_host)
                    found.append(time.perf_counter() - begun_s)
                seconds[is_sparse, in_host] = found
                if device == "cuda":
                    facts[f"MiB of activations, {name}"] = (torch.cuda.max_memory_allocated() - before) / 2**20
                counts = engine.prefill_counts
                if counts is not None and counted is not None:
                    facts[f"density, {name}"] = counts.density
                    facts[f"GiB read, {name}"] = (counts.loaded_bytes - counted.loaded_bytes) / 2**30 / repetitions
    copied = (sum(range(0, num_tokens, chunk_tokens)) + num_tokens) * token_bytes
    on_device = report.add(case, "full, on the device", seconds[False, False])
    in_host_row = report.add(case, "full, in host memory", seconds[False, True], against=on_device)
    report.add(case, "sparse, on the device", seconds[True, False], against=on_device)
    report.add(case, "sparse, in host memory", seconds[True, True], against=on_device)
    link_s = link_seconds(device, copied)
    report.add(case, "link", [link_s], num_bytes=copied)
    allowed_s = max(TARGET * on_device.median_s, link_s)
    report.facts[case] = {
        "tokens/s on the device": num_tokens / on_device.median_s,
        "tokens/s in host memory": num_tokens / in_host_row.median_s,
        "of the allowed time": in_host_row.median_s / allowed_s,
        "GiB over the link": copied / 2**30,
        "largest difference of logits": float((logits[False, True] - logits[False, False]).abs().max()),
        "and between both sparse ones": float((logits[True, True] - logits[True, False]).abs().max()),
        "largest logit": float(logits[False, False].abs().max()),
        "same token": bool(logits[False, True].argmax() == logits[False, False].argmax()),
        **facts,
    }
    report.headline["of_allowed_time"] = in_host_row.median_s / allowed_s


def timed(device: str, call: Callable[[], object], repetitions: int) -> list[float]:
    """Return the seconds of each repetition, the device's work included, after a first one."""
    samples = []
    for _ in range(repetitions + 1):
        synchronize(device)
        begun_s = time.perf_counter()
        call()
        synchronize(device)
        samples.append(time.perf_counter() - begun_s)
    return samples[1:]


def measure_kernel(report: Report, device: str, *, num_tokens: int, repetitions: int) -> None:
    heads, kv_heads, dim = (QUERY_HEADS, KV_HEADS, HEAD_DIM) if device == "cuda" else (4, 2, 32)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    block_size = XAttention().block_size
    query = torch.randn(heads, num_tokens, dim, device=device, dtype=dtype)
    k, v = torch.randn(2, num_tokens, kv_heads, dim, device=device, dtype=dtype)
    dense_k, dense_v = (one.transpose(0, 1).unsqueeze(0).contiguous() for one in (k, v))
    case = f"attention of {num_tokens} tokens"

    def dense() -> None:
        backends = [SDPBackend.FLASH_ATTENTION] if device == "cuda" else [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
        with sdpa_kernel(backends):
            functional.scaled_dot_product_attention(query[None], dense_k, dense_v, is_causal=True, enable_gqa=True)

    flash = report.add(case, "flash attention of torch", timed(device, dense, repetitions))
    num_blocks = -(-num_tokens // block_size)
    selection = Selection(
        blocks=torch.zeros(heads, num_blocks, num_blocks, dtype=torch.int32, device=device),
        counts=torch.zeros(heads, num_blocks, dtype=torch.int32, device=device),
        is_used=torch.zeros(num_blocks, dtype=torch.int32, device=device),
        own_block=0,
    )
    state = RunningState(
        total=torch.zeros(heads, num_tokens, dim, device=device),
        largest=torch.full((heads, num_tokens), -math.inf, device=device),
        sum=torch.zeros(heads, num_tokens, device=device),
    )
    bounds = torch.tensor([0, num_blocks], dtype=torch.int32, device=device)
    num_pages = -(-num_tokens // PAGE_SIZE)
    pages = torch.randperm(num_pages, device=device)
    paged = (torch.randn(num_pages, PAGE_SIZE, kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
    spans = {
        "adjacent": KeySpan(k=k.unsqueeze(1), v=v.unsqueeze(1), pages=None, num_tokens=num_tokens, first_block=0, is_own=True),
        f"pages of {PAGE_SIZE}": KeySpan(
            **dict(zip("kv", paged, strict=True)), pages=pages, num_tokens=num_tokens, first_block=0, is_own=True
        ),
    }
    sums = torch.empty(heads, num_blocks, num_blocks, device=device)
    lse = torch.empty(heads, -(-num_tokens // XAttention().stride), num_blocks, device=device)
    whole = (lse, sums, selection, state, bounds)
    for name, span in spans.items():
        _measure_span(report, case, name, span, query, whole, flash, repetitions)


def _measure_span(
    report: Report,
    case: str,
    name: str,
    span: KeySpan,
    query: Tensor,
    whole: tuple[Tensor, Tensor, Selection, RunningState, Tensor],
    flash: Row,
    repetitions: int,
) -> None:
    lse, sums, selection, state, bounds = whole
    device = str(query.device.type)
    kernels, scale = sparse_kernels(has_triton=device == "cuda"), query.shape[-1] ** -0.5
    heads, num_blocks = selection.counts.shape
    estimated = timed(device, lambda: kernels.estimate(query, span, lse, XAttention(), scale), repetitions)
    report.add(case, f"estimate, {name}", estimated, against=flash)
    for threshold in KERNEL_THRESHOLDS:
        policy = XAttention(threshold=threshold)
        selected = timed(device, partial(kernels.select, lse, sums, selection, policy), repetitions)
        density = int(selection.counts.sum()) / (heads * num_blocks * (num_blocks + 1) / 2)
        attended = timed(
            device, partial(kernels.attend, query, span, selection, bounds, state, policy.block_size, scale), repetitions
        )
        report.add(case, f"select, threshold {threshold:g}, {name}", selected, against=flash)
        row = report.add(case, f"attend, density {density:.3f}, {name}", attended, against=flash)
        speed = (row.ratio or 0) * density
        report.facts[f"density {density:.3f}, {name}"] = {
            "speed x density": speed,
            "with estimate and selection": flash.median_s / (row.median_s + min(estimated) + min(selected)) * density,
        }
        report.headline["least_speed_times_density"] = min(report.headline.get("least_speed_times_density", math.inf), speed)


def haystack(num_tokens: int, depth: float, *, is_odd: bool) -> tuple[list[int], int]:
    """Return tokens with a key of 16 tokens and its value at a depth, ending with the key, and the value.

    Args:
        is_odd: Whether the distance from a token of the last key to the position that it attends to is odd.
    """
    generator = random.Random(f"{depth} {is_odd}")
    tokens = [generator.randrange(24, NUM_TOKENS) for _ in range(num_tokens)]
    key = list(range(2, 18))
    generator.shuffle(key)
    value = generator.randrange(18, 24)
    at = int(depth * (num_tokens - 40))
    at += ((num_tokens - 17 - at) % 2 == 1) != is_odd
    tokens[at : at + 17] = [*key, value]
    tokens[-16:] = key
    return tokens, value


def measure_needle(report: Report, device: str, *, lengths: Sequence[int], chunk_tokens: int) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        directory = make_needle_model(Path(folder), dtype)
        for num_tokens in lengths:
            for threshold in NEEDLE_THRESHOLDS:
                engine = EmbeddedEngine(
                    directory,
                    shard=Shard(page_size=PAGE_SIZE),
                    num_pages=-(-num_tokens // PAGE_SIZE),
                    device=device,
                    max_seq_len=num_tokens + 1,
                    sparse_prefill=XAttention(threshold=threshold),
                    chunk_tokens=chunk_tokens,
                )
                found = {True: 0, False: 0}
                for depth, is_odd in itertools.product(DEPTHS, found):
                    tokens, value = haystack(num_tokens, depth, is_odd=is_odd)
                    found[is_odd] += int(prefill(engine, tokens, chunk_tokens, in_host=False).argmax()) == value
                counts = engine.prefill_counts
                assert counts is not None
                report.facts[f"needle in {num_tokens} tokens, threshold {threshold:g}"] = {
                    "found at odd distances": f"{found[True]} of {len(DEPTHS)}",
                    "at even ones": f"{found[False]} of {len(DEPTHS)}",
                    "density": counts.density,
                }
                engine.close()


def measure_memory(report: Report, device: str, *, context: int, chunk_tokens: int) -> None:
    is_gpu = device == "cuda"
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_GLM if is_gpu else _GLM | _TINY_GLM))
        config = PrefillNodeConfig.model_validate(
            {
                "model": folder,
                "device": device,
                "dummy_weights": True,
                "memory": {"device_memory": "24GiB"} if is_gpu else {},
                "limits": {"max_step_tokens": chunk_tokens, "max_running_requests": 1},
                "chunk": {"chunk_tokens": chunk_tokens},
                "offload": {"host_ratio": 1},
                "prefill": {"sparse_policy": "xattention"},
                "pool": {"num_pages": 1024},
            }
        )
        before = torch.cuda.memory_allocated() if is_gpu else 0
        engine = load_engine(config, rank=0, rendezvous=Path(folder) / "rendezvous")
        with closing(engine, -(-context // PAGE_SIZE)):
            plan = engine.memory_plan
            assert plan is not None
            transfer_lines = ("in_use", "staging", "ring", "reserve", "left")
            declared = sum(line.num_bytes for line in plan.lines if not line.inside and line.name not in transfer_lines)
            steps = {}
            for first_token in (0, context // 16, context - chunk_tokens):
                part = [7] * chunk_tokens
                if is_gpu:
                    torch.cuda.reset_peak_memory_stats()
                begun_s = time.perf_counter()
                engine.prefill([item_of(part, first_token, in_host=True, is_last=first_token + chunk_tokens == context)])
                synchronize(device)
                steps[first_token] = time.perf_counter() - begun_s
                if is_gpu:
                    peak = torch.cuda.max_memory_allocated() - before
                    report.facts[f"memory of a step at token {first_token}"] = {
                        "GiB at the peak": peak / 2**30,
                        "GiB above what is declared": (peak - declared) / 2**30,
                        "GiB of the plan's reserve": plan.reserved_bytes / 2**30,
                    }
            for first_token, step_s in steps.items():
                report.add("24 GB, 1M tokens", f"step of {chunk_tokens} at token {first_token}", [step_s])
            facts: dict[str, object] = {line.name: line.num_bytes for line in plan.lines if not line.inside}
            if is_gpu:
                allocated = torch.cuda.memory_allocated() - before
                facts |= {"declared": declared, "allocated": allocated, "allocated / declared": allocated / declared}
                report.headline["allocated_of_declared"] = allocated / declared
            report.facts["plan and memory"] = facts


def main() -> None:
    parser = argument_parser("prefill of long prompts: KV in host memory, and block-sparse attention")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--tokens", type=int, help="length of the prompt (default: 131072; 2048 on a CPU)")
    parser.add_argument("--chunk", type=int, help="tokens of a step (default: 8192; 512 on a CPU)")
    parser.add_argument("--layers", type=int, help="layers of the model (default: 32; 2 on a CPU)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each measurement (default: 3)")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_small = device == "cpu" or arguments.quick
    num_tokens = arguments.tokens or (2048 if device == "cpu" else 16_384 if arguments.quick else 131_072)
    chunk_tokens = arguments.chunk or (512 if device == "cpu" else 8192)
    repetitions = 1 if arguments.quick else arguments.repetitions
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU, tiny"
    report = Report(title=f"Prefill in chunks of {chunk_tokens:,} tokens on {name}")
    # Memory first: what another part leaves in the allocator would count as in use.
    if "memory" in arguments.parts:
        measure_memory(
            report, device, context=1 << 13 if device == "cpu" else 1 << 20, chunk_tokens=512 if device == "cpu" else 2048
        )
    if "prefill" in arguments.parts:
        measure_prefill(
            report,
            device,
            num_tokens=num_tokens,
            chunk_tokens=chunk_tokens,
            num_layers=arguments.layers or (32 if device == "cuda" else 2),
            repetitions=repetitions,
        )
    if "kernel" in arguments.parts:
        measure_kernel(report, device, num_tokens=num_tokens, repetitions=repetitions)
    if "needle" in arguments.parts:
        measure_needle(report, device, lengths=(2048,) if is_small else (4096, 32_768, 131_072), chunk_tokens=chunk_tokens)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
