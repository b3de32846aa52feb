"""A request's KV from pool to pool as SGLang's staging moves it: its gather call, one NIXL write, its scatter call, one by one.

Left out, in its favour: its control messages (the target hears of the write by NIXL's own note, polling for it), and cutting the
destination's page table out of its own. There is no digest, for SGLang makes none here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.link_plan import Samples
from bench.pair import bytes_on, synchronize
from bench.peers import sglang
from bench.peers.nixl import NixlEnd
from bench.pool_setting import SEED, Case, PagePicker, Setting
from transfer.pool.kv_pool import KVPool

_REQUEST = "request"
_WARMUP = 2


def write(
    pipe: Connection, device: str, setting: Setting, cases: Sequence[Case], repetitions: int, wheel: Path | None
) -> dict[str, Samples]:
    """The prefill rank: seconds of each request, by case, from its first call until the target's device has scattered it."""
    theirs = sglang.load(wheel)
    picker = PagePicker(setting, setting.prefill_shard, device, seed=SEED)
    picker.fill(SEED)
    staging = theirs.buffer(max(setting.moved_bytes(case.num_tokens) for case in cases), torch.device(device))
    synchronize(device)
    end = NixlEnd("writer", staging.buffer)
    pipe.send(end.blob)
    end.meet(pipe.recv())
    keys, values = _layers(picker.pool)
    heads, page_size = setting.route.heads.count, setting.prefill_page_size
    found: dict[str, Samples] = {}
    for case in cases:
        samples_s = found[setting.name_of(case)] = []
        for turn in range(_WARMUP + repetitions):
            picker.pick([_REQUEST], case.num_tokens)
            pages = np.array(picker.pages[_REQUEST], dtype=np.int32)
            pipe.recv()  # the target has its pages
            begun_s = time.monotonic()
            num_bytes = theirs.gather(keys, values, pages, staging, num_heads=heads, page_size=page_size)
            end.write_once(num_bytes, b"written")
            done_s = pipe.recv()
            if turn >= _WARMUP:
                samples_s.append(done_s - begun_s)
        _check(staging.buffer, picker, setting, case, heads)
    pipe.send("done")
    end.close()
    return found


def serve(pipe: Connection, device: str, setting: Setting, cases: Sequence[Case], repetitions: int, wheel: Path | None) -> None:
    """The decode rank."""
    theirs = sglang.load(wheel)
    picker = PagePicker(setting, setting.decode_shard, device, seed=SEED + 1)
    ring = bytes_on(device, max(setting.moved_bytes(case.num_tokens) for case in cases))
    synchronize(device)
    end = NixlEnd("target", ring)
    end.meet(pipe.recv())
    pipe.send(end.blob)
    keys, values = _layers(picker.pool)
    heads, page_size = setting.route.heads.count, setting.decode_page_size
    for case in cases:
        for _ in range(_WARMUP + repetitions):
            picker.pick([_REQUEST], case.num_tokens)
            pages = torch.tensor(picker.pages[_REQUEST], device=device)
            synchronize(device)
            pipe.send("ready")
            end.wait_for_note()
            theirs.scatter(ring, keys, values, pages, num_heads=heads, page_size=page_size)
            synchronize(device)
            pipe.send(time.monotonic())
        _check(ring, picker, setting, case, heads)
    pipe.recv()
    end.close()


def _layers(pool: KVPool) -> tuple[list[Tensor], list[Tensor]]:
    """K and V of every layer as SGLang has them: [slots, heads, head_dim]."""
    layers = range(pool.layout.num_layers)
    keys, values = ([pool.buffer(layer, is_v=is_v).flatten(0, 1) for layer in layers] for is_v in (False, True))
    return keys, values


def _check(wire: Tensor, picker: PagePicker, setting: Setting, case: Case, heads: int) -> None:
    """The pool has in the request's pages what lies on the wire, or the sequence was called wrong."""
    layers, size = setting.layout.num_layers, picker.pool.page_size
    pages = torch.tensor(picker.pages[_REQUEST], device=wire.device)
    slots = (pages[:, None] * size + torch.arange(size, device=wire.device)).view(-1)[: case.num_tokens]
    parts = wire[: setting.moved_bytes(case.num_tokens)].view(picker.pool.buffer(0, is_v=False).dtype)
    parts = parts.view(2, layers, case.num_tokens, heads, -1)
    for layer in (0, layers // 2, layers - 1):
        for is_v, part in enumerate(picker.pool.read(layer, slots)):
            if not torch.equal(part[:, :heads].view(torch.int16), parts[is_v, layer].view(torch.int16)):
                raise RuntimeError(f"layer {layer}: what SGLang's calls moved is not what the pool has")
