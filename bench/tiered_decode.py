"""Decode over device and host memory: what a step takes for its bytes in host memory, and what saving pages beside it costs.

    python -m bench.tiered_decode [--json FILE] [--quick] [--device cpu|cuda] [--layers N] [--host-mb N ...] [--block-mb 32]

The model is a Llama of the 8B's shape with made-up weights (on a CPU a tiny one). One request has so many bytes of its KV in host
memory and its newest 1,024 tokens on the device. "plain copy" is one pinned copy of 1 GiB to the device in the same run; the
ratio of "step" to it is the link's use: what a step would take for its host bytes at that speed, over what it takes.

The second part decodes a batch that lies on the device as a whole, by CUDA graphs, alone and while every page is saved to host
memory that the batch has just finished ("saves beside"), each in turn; "saves without a pause" fills the link all the time and is
told, not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.llama_engine import PAGE_SIZE, llama_engine
from bench.timing import Report, Row, argument_parser, readable_bytes, sample
from embedded_engine.engine import EmbeddedEngine
from transfer.copy.page_mover import PageMove, PageMover
from transfer.engine_types import DecodeItem
from transfer.layer_groups import NO_PAGE
from transfer.pool.host_pool import HostPool

TARGET_OF_LINK = 1 / 1.3
TARGET_BESIDE_SAVES = 0.97
WINDOW_PAGES = 64
LINK = "plain copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured.

    Args:
        num_layers: Of the model.
        host_bytes: Of the request in host memory, for each row.
        batch, context: Requests of the second part, and tokens of each at its beginning.
        num_steps: Decode steps of a sample of the second part; a multiple of the page size.
    """

    device: str
    num_layers: int
    host_bytes: tuple[int, ...]
    block_bytes: int
    batch: int
    context: int
    num_steps: int
    repetitions: int


def make_engine(setting: Setting, *, num_pages: int, max_seq_len: int, max_running_requests: int) -> EmbeddedEngine:
    return llama_engine(
        setting.device,
        num_layers=setting.num_layers,
        num_pages=num_pages,
        max_seq_len=max_seq_len,
        max_running_requests=max_running_requests,
        has_host_pages=True,
        is_tiny=setting.device == "cpu",
    )


def measure(setting: Setting) -> Report:
    name = torch.cuda.get_device_name() if setting.device == "cuda" else "a CPU"
    report = Report(title=f"Decode over device and host memory on {name}: a Llama with {setting.num_layers} layers")
    _measure_tiered(report, setting)
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    _measure_saves(report, setting)
    report.headline["must_reach_of_link"] = TARGET_OF_LINK
    report.headline["must_reach_beside_saves"] = TARGET_BESIDE_SAVES
    return report


def _measure_tiered(report: Report, setting: Setting) -> None:
    probe = make_engine(setting, num_pages=1, max_seq_len=PAGE_SIZE, max_running_requests=1)
    page_bytes = probe.pool.num_bytes
    probe.close()
    del probe
    most_pages = max(setting.host_bytes) // page_bytes
    engine = make_engine(
        setting, num_pages=WINDOW_PAGES, max_seq_len=(most_pages + WINDOW_PAGES) * PAGE_SIZE, max_running_requests=1
    )
    host = HostPool(engine.pool, num_pages=[most_pages])
    engine.capture_cuda_graphs((1,) if setting.device == "cuda" else ())
    engine.use_host_pool(host, block_bytes=setting.block_bytes)
    host_pages = torch.randperm(most_pages, generator=torch.Generator().manual_seed(1)).tolist()
    link = _measure_link(report, setting)
    ratios: list[float] = []
    for num_bytes in setting.host_bytes:
        count = num_bytes // page_bytes
        item = DecodeItem(
            request_id="a",
            token_id=5,
            position=(count + WINDOW_PAGES) * PAGE_SIZE - 1,
            page_tables=((NO_PAGE,) * count + tuple(range(WINDOW_PAGES)),),
            host_tables=(tuple(host_pages[:count]),),
        )
        samples_s = sample(lambda item=item: engine.decode([item]), repetitions=setting.repetitions, warmup=2)  # type: ignore[misc]
        case = f"{readable_bytes(count * page_bytes)} in host memory, {count * PAGE_SIZE} tokens"
        row = report.add(case, "step", samples_s, num_bytes=count * page_bytes, against=link)
        assert row.ratio is not None  # it is held against the link
        report.facts[case] = {"time over bytes / link": 1 / row.ratio}
        ratios.append(row.ratio)
    report.headline["ratio_of_longest"] = ratios[-1]
    engine.close()
    host.close()


def _measure_link(report: Report, setting: Setting) -> Row:
    is_gpu = setting.device == "cuda"
    num_bytes = 1 << 30 if is_gpu else 1 << 26
    source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=setting.device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if is_gpu:
            torch.cuda.synchronize()

    return report.add(readable_bytes(num_bytes), LINK, sample(copy, repetitions=setting.repetitions), num_bytes=num_bytes)


class Batch:
    """Requests on the device that decode in step, from the same context each time.

    Args:
        setting: What is measured.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        pages_each = -(-(setting.context + setting.num_steps) // PAGE_SIZE)
        num_pages = setting.batch * pages_each
        self.engine = make_engine(
            setting, num_pages=num_pages, max_seq_len=pages_each * PAGE_SIZE, max_running_requests=setting.batch
        )
        self.engine.capture_cuda_graphs((setting.batch,) if setting.device == "cuda" else ())
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(2)).tolist()
        self._tables = [tuple(order[index * pages_each : (index + 1) * pages_each]) for index in range(setting.batch)]

    def decode(self, on_finished: Callable[[list[int]], None]) -> float:
        """Seconds of all steps; `on_finished` is told the device pages that a step has filled."""
        begun = time.perf_counter()
        for step in range(self._setting.num_steps):
            position = self._setting.context + step
            items = [
                DecodeItem(request_id=str(index), token_id=5 + index % 100, position=position, page_tables=(table,))
                for index, table in enumerate(self._tables)
            ]
            self.engine.decode(items)
            if position % PAGE_SIZE == PAGE_SIZE - 1:
                on_finished([table[position // PAGE_SIZE] for table in self._tables])
        return time.perf_counter() - begun


@contextlib.contextmanager
def saving(
    mover: PageMover, num_host_pages: int, *, has_pauses: bool, least_pause_s: float = 0.0
) -> Iterator[Callable[[list[int]], None]]:
    """A thread that saves what it is told; without pauses the last pages again and again.

    Args:
        least_pause_s: Between two saves. A thread that saves in host memory gives the interpreter up only for moments, so others
            would hardly run.
    """
    told: queue.Queue[list[int] | None] = queue.Queue()

    def run() -> None:
        pages: list[int] | None = told.get()
        while pages is not None:
            mover.save([PageMove(group=0, device_pages=pages, host_pages=range(min(len(pages), num_host_pages)))])
            time.sleep(least_pause_s)
            if has_pauses or not told.empty():
                pages = told.get()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield told.put
    finally:
        told.put(None)
        thread.join()


def _measure_saves(report: Report, setting: Setting) -> None:
    batch = Batch(setting)
    host = HostPool(batch.engine.pool, num_pages=[setting.batch])
    mover = PageMover(batch.engine.pool, host, buffer_bytes=max(64 << 20, 2 * host.page_bytes[0]))
    samples_s: dict[str, list[float]] = {"alone": [], "saves beside": [], "saves without a pause": []}
    for repetition in range(-1, setting.repetitions):
        with saving(mover, setting.batch, has_pauses=True) as save:
            found = {"alone": batch.decode(lambda pages: None), "saves beside": batch.decode(save)}
        least_pause_s = 1e-3 if setting.device == "cpu" else 0.0
        with saving(mover, setting.batch, has_pauses=False, least_pause_s=least_pause_s) as save:
            save(list(range(setting.batch)))
            found["saves without a pause"] = batch.decode(save)
        if repetition >= 0:
            for what, seconds in found.items():
                samples_s[what].append(seconds)
    case = f"{setting.num_steps} steps of {setting.batch} requests from {setting.context} tokens on"
    alone = report.add(case, "alone", samples_s.pop("alone"))
    ratios = {what: report.add(case, what, found_s, against=alone).ratio or 0.0 for what, found_s in samples_s.items()}
    tokens = setting.num_steps * setting.batch
    report.facts[case] = {
        "tokens/s alone": tokens / alone.median_s,
        "bytes saved a sample": setting.num_steps // PAGE_SIZE * setting.batch * host.page_bytes[0],
    }
    report.headline["ratio_beside_saves"] = ratios["saves beside"]
    batch.engine.close()
    host.close()


def parser() -> argparse.ArgumentParser:
    made = argument_parser("decode over device and host memory")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--layers", type=int, help="of the model; 32 on a GPU, 2 on a CPU")
    made.add_argument("--host-mb", type=int, nargs="+", help="MiB of a request in host memory")
    made.add_argument("--block-mb", type=float, help="MiB of a layer's K and V that are read together")
    return made


def setting_of(arguments: Any) -> Setting:
    is_gpu, is_quick = arguments.device == "cuda", arguments.quick
    default_mb = ((64, 256) if is_quick else (256, 1024, 2048, 4096, 16_384)) if is_gpu else (1,)
    sizes_mb: Sequence[int] = arguments.host_mb or default_mb
    return Setting(
        device=arguments.device,
        num_layers=arguments.layers or (32 if is_gpu and not is_quick else 2),
        host_bytes=tuple(size << 20 for size in sorted(sizes_mb)),
        block_bytes=int((arguments.block_mb or (32 if is_gpu else 0.0625)) * (1 << 20)),
        batch=32 if is_gpu else 2,
        context=2048 if is_gpu else 64,
        num_steps=64 if is_gpu and not is_quick else 16,
        repetitions=3 if is_quick else 10,
    )


def main() -> None:
    arguments = parser().parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    measure(setting_of(arguments)).finish(arguments.json)


if __name__ == "__main__":
    main()
