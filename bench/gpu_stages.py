"""Prefill and decode steps of a whole model on a GPU: what the simulation of a cluster (bench/simulate.py) is fed with.

    python -m bench.gpu_stages [--json FILE] [--quick] [--rehearse]

The model has the shape of Llama 3 8B, all its 32 layers and made-up weights, TP 1. A step is what passes from its items to its
tokens on the host, device time included: a prefill step computes new tokens of one prompt, of which some may be in the pool
already; a decode step one token of each request, by a CUDA graph. ``--rehearse`` runs a tiny model on CPUs, to see that it runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from bench.llama_engine import PAGE_SIZE, llama_engine
from bench.timing import Report, argument_parser
from transfer.engine_types import DecodeItem, PrefillItem

NUM_LAYERS, MAX_SEQ_LEN = 32, 16_384
PREFILLS = ((128, 0), (512, 0), (1024, 0), (2048, 0), (4096, 0), (8192, 0), (2048, 2048), (2048, 6144), (2048, 14_336))
"""New tokens of a step, and tokens before them."""
MAX_TOKENS = 3 << 17  # of a decode step: pool, weights and the largest prefill step fit 80 GiB
DECODES = tuple(
    (batch, context) for context in (1024, 4096, 8192) for batch in (1, 8, 32, 64, 128) if batch * context <= MAX_TOKENS
)
"""Requests of a step, and tokens of each."""


def measure(*, device: str, num_layers: int, repetitions: int, is_tiny: bool) -> Report:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    report = Report(title=f"Steps on {name}: Llama 3 8B's shape, {num_layers} layers{', tiny' if is_tiny else ''}")
    prefills = [(tokens // 64, before // 64) if is_tiny else (tokens, before) for tokens, before in PREFILLS]
    decodes = [(min(batch, 4), context // 64) if is_tiny else (batch, context) for batch, context in DECODES]
    batches = sorted({batch for batch, _ in decodes})
    num_pages = max(batch * context for batch, context in decodes) // PAGE_SIZE + 1
    engine = llama_engine(
        device,
        num_layers=num_layers,
        num_pages=num_pages,
        max_running_requests=max(batches),
        max_seq_len=MAX_SEQ_LEN,
        is_tiny=is_tiny,
    )
    if device == "cuda":
        engine.capture_cuda_graphs(batches)
    for tokens, before in prefills:
        new = prefill_items(tokens, before)
        samples = _samples(lambda items=new: engine.prefill(items), device, repetitions)  # type: ignore[misc]
        report.add(f"prefill of {tokens} tokens behind {before}", "step", samples)
        report.facts[f"prefill of {tokens} tokens behind {before}"] = {"new": tokens, "before": before}
    for batch, context in decodes:
        case, items = f"decode of {batch} requests of {context} tokens", decode_items(batch, context)
        report.add(case, "step", _samples(lambda items=items: engine.decode(items), device, repetitions))  # type: ignore[misc]
        report.facts[case] = {"requests": batch, "context": context}
    engine.close()
    prefill_terms = {
        f"prefill of {new} tokens behind {before}": (1.0, new, new * before + new * (new - 1) / 2) for new, before in prefills
    }
    decode_terms = {
        f"decode of {batch} requests of {context} tokens": (1.0, batch, batch * context) for batch, context in decodes
    }
    for step, terms, rates in (
        ("prefill", prefill_terms, ("token", "attention")),
        ("decode", decode_terms, ("request", "context")),
    ):
        names = [f"{step}_{rate}_s" for rate in ("step", *rates)]
        report.facts[f"stage times of {step}"] = dict(fit(report, terms, names))
    return report


def fit(report: Report, terms: Mapping[str, tuple[float, ...]], names: Sequence[str]) -> dict[str, float]:
    """Return constants of `StageTimes` in seconds: least squares of the relative error over the medians of steps.

    Args:
        terms: What a step's time is linear in, by case.
        names: Name of each term's constant.
    """
    medians_s = {row.case: row.median_s for row in report.rows}
    relative = np.array([np.array(values) / medians_s[case] for case, values in terms.items()])
    constants = np.linalg.lstsq(relative, np.ones(len(terms)))[0]
    largest_error = float(abs(relative @ constants - 1).max())
    return dict(zip(names, constants.tolist(), strict=True)) | {"largest_error": largest_error}


def _samples(step: Callable[[], object], device: str, repetitions: int) -> list[float]:
    samples = []
    for repetition in range(-2, repetitions):
        if device == "cuda":
            torch.cuda.synchronize()
        begun_s = time.perf_counter()
        step()
        if repetition >= 0:
            samples.append(time.perf_counter() - begun_s)
    return samples


def prefill_items(tokens: int, before: int) -> list[PrefillItem]:
    """Return the items of a step that computes `tokens` tokens of one prompt behind `before` others."""
    pages = tuple(range(-(-(tokens + before) // PAGE_SIZE)))
    ids = tuple(5 + index % 400 for index in range(tokens))
    return [PrefillItem(request_id="0", token_ids=ids, first_token=before, page_tables=(pages,), is_last=True)]


def decode_items(batch: int, context: int) -> list[DecodeItem]:
    """Return the items of a step with one token for each of `batch` requests of `context` tokens."""
    each = context // PAGE_SIZE
    return [
        DecodeItem(
            request_id=str(index),
            token_id=5 + index,
            position=context - 1,
            page_tables=(tuple(range(index * each, (index + 1) * each)),),
        )
        for index in range(batch)
    ]


def main() -> int:
    parser = argument_parser("prefill and decode steps of a whole model on a GPU")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on CPUs")
    arguments = parser.parse_args()
    device = "cpu" if arguments.rehearse else "cuda"
    report = measure(
        device=device,
        num_layers=2 if arguments.rehearse else NUM_LAYERS,
        repetitions=2 if arguments.quick or arguments.rehearse else 15,
        is_tiny=arguments.rehearse,
    )
    report.finish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
