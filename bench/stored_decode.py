"""Decode of a request whose KV lies in the store: the time of a step, against a step that has the same KV in host memory.

    python -m bench.stored_decode [--json FILE] [--quick] [--device cpu|cuda] [--layers N] [--stored-mb N] [--directory DIR]

The model is a Llama of the 8B's shape with made-up weights; on a CPU it is a tiny one. One request has so many bytes of its KV in
blocks in a directory, and its newest 1,024 tokens on the device. "reads alone" reads the same objects without an engine. If a
step takes less than the sum of "reads alone" and "host memory", reads and attention overlap.

Files that were just written come from the page cache of the system, so these numbers are an upper bound of any disk.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.llama_engine import PAGE_SIZE, llama_engine
from bench.timing import Report, argument_parser, readable_bytes, sample
from decode_node.offload.running_blocks import RunningBlocks
from decode_node.offload.sizes import stored_block_pages
from node_runtime.rank_process import SWITCH_INTERVAL_S
from transfer.config import StorageConfig
from transfer.engine_types import DecodeItem, StoredRead
from transfer.instance import Instance
from transfer.layer_groups import NO_PAGE
from transfer.messages import PROTOCOL_VERSIONS
from transfer.metrics import RankMetrics
from transfer.pool.host_pool import HostPool
from transfer.storage.open import open_store_client

WINDOW_PAGES = 64
NUM_BUFFERS = 5
BLOCK_BYTES = 32 << 20
"""Size of the device buffers."""


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop on a thread of its own, as a rank's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def measure(device: str, *, num_layers: int, stored_bytes: int, directory: Path, repetitions: int) -> Report:
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    report = Report(title=f"Decode with KV in the store on {name}: a Llama with {num_layers} layers")
    is_tiny = device == "cpu"
    probe = llama_engine(
        device, num_layers=num_layers, num_pages=1, max_seq_len=PAGE_SIZE, max_running_requests=1, is_tiny=is_tiny
    )
    page_bytes = probe.pool.num_bytes
    probe.close()
    del probe
    count = stored_bytes // page_bytes
    engine = llama_engine(
        device,
        num_layers=num_layers,
        num_pages=WINDOW_PAGES,
        max_seq_len=(count + WINDOW_PAGES) * PAGE_SIZE,
        max_running_requests=1,
        has_host_pages=True,
        is_tiny=is_tiny,
    )
    host = HostPool(engine.pool, num_pages=[count])
    host_pages = count
    host.pages(0).view(torch.int16).random_(0, 1 << 14)  # below 2, as bfloat16 and as float32
    size = stored_block_pages(slice_bytes=page_bytes // num_layers, buffer_bytes=BLOCK_BYTES, host_pages=count)
    count -= count % size
    with running_loop() as loop:

        async def opened() -> RunningBlocks:
            instance = Instance(
                incarnation=1,
                layout=engine.layout,
                shard=engine.shard,
                model_fields=dict(engine.model_fields),
                transport="inproc",
                digests=("xxh3-64",),
                protocol_versions=PROTOCOL_VERSIONS,
                capabilities=frozenset(),
            )
            client = open_store_client(
                StorageConfig(directory=directory), loop=loop, observer=RankMetrics(role="decode", rank=0).store
            )
            assert client is not None
            return RunningBlocks(
                host, client, loop=loop, instance=instance, pool=engine.pool, pages_per_block=size, num_buffers=NUM_BUFFERS
            )

        blocks = asyncio.run_coroutine_threadsafe(opened(), loop).result()

        def put(index: int) -> int:
            pages = range(index * size, (index + 1) * size)
            number = asyncio.run_coroutine_threadsafe(blocks.put("a", index, pages), loop).result()
            assert number is not None
            return number

        stored = tuple(put(index) for index in range(count // size))
        engine.use_host_pool(host, block_bytes=BLOCK_BYTES, stored=blocks)

        def item(**where: Any) -> DecodeItem:
            table = (NO_PAGE,) * count + tuple(range(WINDOW_PAGES))
            position = (count + WINDOW_PAGES) * PAGE_SIZE - 1
            return DecodeItem(request_id="a", token_id=5, position=position, page_tables=(table,), **where)

        def buffers() -> Iterator[Tensor]:
            blocks.begin([StoredRead(layer=layer, block=number) for layer in range(num_layers) for number in stored])
            for _ in range(num_layers * len(stored)):
                buffer = blocks.next()
                assert buffer is not None
                yield blocks.buffers[buffer]
                blocks.release(buffer)

        def read() -> None:
            deque(buffers(), maxlen=0)

        num_bytes = count * page_bytes
        case = f"{readable_bytes(num_bytes)}, {count * PAGE_SIZE} tokens, blocks of {size} pages"
        in_host, in_store = item(host_tables=(tuple(range(count)),)), item(stored_blocks=stored)
        # Not the tokens: the two steps add the parts of the softmax in another order, and half precision rounds differently.
        slices = host.pages(0).view(torch.uint8).view(host_pages, num_layers, -1)
        for number, buffer in enumerate(buffers()):
            layer, block = divmod(number, len(stored))
            expected = slices[block * size : (block + 1) * size, layer]
            assert torch.equal(buffer[: expected.numel()].view(expected.shape), expected)

        def logits(one: DecodeItem) -> Tensor:
            found = engine.logits(engine.decode_batch([one]))
            assert found is not None
            return found.float().cpu()

        of_host, of_store = logits(in_host), logits(in_store)
        difference = float((of_host - of_store).abs().max() / of_host.abs().max())
        measured: dict[str, Callable[[], object]] = {
            "host memory": lambda: engine.decode([in_host]),
            "reads alone": read,
            "store": lambda: engine.decode([in_store]),
        }
        samples_s: dict[str, list[float]] = {what: [] for what in measured}
        for _ in range(repetitions):  # in turns, because the speed of a machine changes
            for what, act in measured.items():
                samples_s[what] += sample(act, repetitions=1, warmup=0)
        in_memory = report.add(case, "host memory", samples_s["host memory"], num_bytes=num_bytes)
        alone = report.add(case, "reads alone", samples_s["reads alone"], num_bytes=num_bytes)
        step = report.add(case, "store", samples_s["store"], num_bytes=num_bytes, against=in_memory)
        report.facts[case] = {
            "time over the sum": step.median_s / (in_memory.median_s + alone.median_s),
            "largest difference of logits, of the largest logit": difference,
            "logits that differ": int((of_host != of_store).sum()),
        }
    engine.close()
    host.close()
    return report


def parser() -> argparse.ArgumentParser:
    made = argument_parser("decode with KV in the store")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--layers", type=int, help="of the model; 32 on a GPU, 4 on a CPU")
    made.add_argument("--stored-mb", type=int, help="MiB of the request in the store; 4096 on a GPU, 256 on a CPU")
    made.add_argument("--directory", type=Path, help="of the store; a temporary one without it")
    return made


def main() -> None:
    arguments = parser().parse_args()
    is_gpu = arguments.device == "cuda"
    if not is_gpu:
        torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a rank process
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=arguments.directory) as folder:
        measure(
            arguments.device,
            num_layers=arguments.layers or (32 if is_gpu else 4),
            stored_bytes=(arguments.stored_mb or (4096 if is_gpu else 256)) << 20,
            directory=Path(folder),
            repetitions=3 if arguments.quick else 10,
        ).finish(arguments.json)


if __name__ == "__main__":
    main()
