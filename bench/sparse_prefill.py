"""Prefill of long prompts whose KV lies in host memory, against prefill on the device alone.

    python -m bench.sparse_prefill [--tokens 131072] [--chunk 8192] [--layers 32] [--json FILE] [--quick]

The model has the shape of Llama 3 8B and random weights; without a GPU it is a tiny one. Both engines compute the same prompt in
the same chunks, and their last logits are compared. Each step reads all earlier tokens from host memory once. "link" is a plain
copy from pinned memory of as many bytes as the steps read and write. The target is 1.15 times the time on the device, or the
time of the link, whichever is longer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.llama_engine import PAGE_SIZE, llama_engine
from bench.timing import Report, argument_parser
from embedded_engine.engine import EmbeddedEngine
from transfer.engine_types import PrefillItem
from transfer.layer_groups import NO_PAGE
from transfer.pool.host_pool import HostPool

BUFFER_BYTES = 64 << 20
LINK_BYTES = 1 << 30
TARGET = 1.15


def prefill(engine: EmbeddedEngine, num_tokens: int, chunk_tokens: int, *, in_host: bool) -> Tensor:
    """Compute a prompt. Return the logits of its last token in float32."""
    logits = None
    for begin in range(0, num_tokens, chunk_tokens):
        end = min(begin + chunk_tokens, num_tokens)
        pages = tuple(range(-(-end // PAGE_SIZE)))
        item = PrefillItem(
            request_id="a",
            token_ids=tuple((position * 37 + 11) % 500 for position in range(begin, end)),
            first_token=begin,
            page_tables=((NO_PAGE,) * len(pages) if in_host else pages,),
            host_tables=(pages,) if in_host else (),
            is_last=end == num_tokens,
        )
        logits = engine.logits(engine.prefill_batch([item]))
    assert logits is not None
    found: Tensor = logits[0].float()
    if found.device.type == "cuda":
        torch.cuda.synchronize(found.device)
    return found.cpu()


@contextmanager
def engine_of(device: str, *, num_layers: int, num_tokens: int, in_host: bool) -> Iterator[EmbeddedEngine]:
    num_pages = -(-num_tokens // PAGE_SIZE)
    engine = llama_engine(
        device,
        num_layers=num_layers,
        num_pages=1 if in_host else num_pages,
        max_seq_len=num_tokens + 1,
        max_running_requests=None,
        is_tiny=device == "cpu",
    )
    host = None
    if in_host:
        host = HostPool(engine.pool, num_pages=[num_pages])
        engine.use_host_pool(host, block_bytes=BUFFER_BYTES)
    try:
        yield engine
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


def measure(device: str, *, num_tokens: int, chunk_tokens: int, num_layers: int, repetitions: int) -> Report:
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU, tiny"
    report = Report(title=f"Prefill of {num_tokens:,} tokens in chunks of {chunk_tokens:,}: {num_layers} layers on {name}")
    samples: dict[bool, Sequence[float]] = {}
    logits: dict[bool, Tensor] = {}
    peaks: dict[bool, int] = {}
    token_bytes = 0
    for in_host in (False, True):
        with engine_of(device, num_layers=num_layers, num_tokens=num_tokens, in_host=in_host) as engine:
            token_bytes = engine.pool.groups[0].page_bytes(engine.pool.layout, engine.pool.shard) // PAGE_SIZE
            prefill(engine, min(num_tokens, 2 * chunk_tokens), chunk_tokens, in_host=in_host)  # compiles kernels
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            found = []
            for _ in range(repetitions):
                begun_s = time.perf_counter()
                logits[in_host] = prefill(engine, num_tokens, chunk_tokens, in_host=in_host)
                found.append(time.perf_counter() - begun_s)
            samples[in_host] = found
            peaks[in_host] = (torch.cuda.max_memory_allocated() if device == "cuda" else 0) - before
    read_tokens = sum(range(0, num_tokens, chunk_tokens))
    copied = (read_tokens + num_tokens) * token_bytes
    case = f"{num_tokens} tokens"
    on_device = report.add(case, "on the device", samples[False])
    in_host_row = report.add(case, "in host memory", samples[True], against=on_device)
    link_s = link_seconds(device, copied)
    report.add(case, "link", [link_s], num_bytes=copied)
    allowed_s = max(TARGET * on_device.median_s, link_s)
    report.facts[case] = {
        "tokens/s on the device": num_tokens / on_device.median_s,
        "tokens/s in host memory": num_tokens / in_host_row.median_s,
        "of the allowed time": in_host_row.median_s / allowed_s,
        "GiB over the link": copied / 2**30,
        "largest difference of logits": float((logits[True] - logits[False]).abs().max()),
        "largest logit": float(logits[False].abs().max()),
        "same token": bool(logits[True].argmax() == logits[False].argmax()),
        "MiB of activations on the device": peaks[False] / 2**20,
        "MiB of activations in host memory": peaks[True] / 2**20,
    }
    report.headline["of_allowed_time"] = in_host_row.median_s / allowed_s
    return report


def main() -> None:
    parser = argument_parser("prefill of long prompts with their KV in host memory")
    parser.add_argument("--tokens", type=int, help="length of the prompt (default: 131072; 2048 on a CPU)")
    parser.add_argument("--chunk", type=int, help="tokens of a step (default: 8192; 128 on a CPU)")
    parser.add_argument("--layers", type=int, help="layers of the model (default: 32; 2 on a CPU)")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    defaults = (131072, 8192, 32, 3) if device == "cuda" else (2048, 128, 2, 3)
    measure(
        device,
        num_tokens=arguments.tokens or defaults[0] // (8 if arguments.quick else 1),
        chunk_tokens=arguments.chunk or defaults[1],
        num_layers=arguments.layers or defaults[2],
        repetitions=1 if arguments.quick else defaults[3],
    ).finish(arguments.json)


if __name__ == "__main__":
    main()
