"""What both ends of the pool-to-pool benchmark have to know, and the pages that they move.

Pools hold random bits, page tables name pages in random order, and what arrived is compared by a path of its own: each end reads
its pages with `KVPool.read`, in the order of the tokens, and digests them; gather and scatter have no part in that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import xxhash
from torch import Tensor

from bench.pair import Devices
from bench.timing import readable_bytes
from transfer.config import PrefillNodeConfig
from transfer.layout import DType, KVLayout, Range, Route, Shard, TokenOrder, routes, wire_bytes
from transfer.pool.kv_pool import KVPool, as_words

MODELS = {
    "llama-8b": KVLayout.uniform(num_layers=32, num_kv_heads=8, head_dim=128, dtype=DType.FLOAT16),
    "llama-70b": KVLayout.uniform(num_layers=80, num_kv_heads=8, head_dim=128, dtype=DType.BFLOAT16),
}
"""Of Llama 3: 128 and 320 KiB a token, over all ranks."""

SEED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A round of requests.

    Args:
        num_tokens: Of each.
        in_flight: So many at a time.
        piece_bytes: Largest piece that they are cut into; None: as the setting has it, or the probe.
    """

    num_tokens: int
    in_flight: int
    piece_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What does not change between rounds. The transfer is that of prefill rank 0 to decode rank 0.

    Args:
        model: Of `MODELS`.
        devices: `writer` is the prefill rank's.
        cases: What is played, one after the other.
        prefill_tp, decode_tp: TP degrees; prefill rank 0 must have a route to decode rank 0 only.
        prefill_page_size, decode_page_size: Tokens per page.
        decode_order: How a page of the decode pool lies in memory; that of the prefill pool is NHD.
        chunk_tokens, layers_per_group: As in `transfer.config.ChunkConfig`.
        num_slots: Staging slots.
        ring_bytes: Size of the ring.
        asks_ahead: Grants are asked for before the KV is computed, as a prefill node does it.

    Raises:
        ValueError: Prefill rank 0 writes to others too.
    """

    model: str
    devices: Devices
    cases: tuple[Case, ...] = ()
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_page_size: int = 16
    decode_page_size: int = 32
    decode_order: str = "NHD"
    chunk_tokens: int
    layers_per_group: int | None = None
    num_slots: int
    ring_bytes: int
    asks_ahead: bool = True

    def __post_init__(self) -> None:
        every = routes(self.layout, self.prefill_shard, self.decode_shard)
        ranks = [route.decode_rank for route in every if not route.prefill_rank]
        if ranks != [0]:
            raise ValueError(
                f"TP {self.prefill_tp} -> {self.decode_tp}: prefill rank 0 writes to decode ranks {ranks}; it must be [0], "
                "so prefill's TP at least decode's and a multiple of it"
            )

    @property
    def layout(self) -> KVLayout:
        return MODELS[self.model]

    @property
    def prefill_shard(self) -> Shard:
        return Shard(tp_size=self.prefill_tp, page_size=self.prefill_page_size)

    @property
    def decode_shard(self) -> Shard:
        return Shard(tp_size=self.decode_tp, page_size=self.decode_page_size, order=TokenOrder(self.decode_order))

    @property
    def route(self) -> Route:
        return _route(self.model, self.prefill_shard, self.decode_shard)

    @property
    def config(self) -> PrefillNodeConfig:
        """The settings that a prefill node would have; the model's directory is not looked at."""
        return self.config_of(None)

    def config_of(self, case: Case | None) -> PrefillNodeConfig:
        """With the pieces of a case."""
        device: Literal["cuda", "cpu"] = "cuda" if self.devices.is_cuda else "cpu"
        piece_bytes = None if case is None else case.piece_bytes
        layers = self.layers_per_group if piece_bytes is None else None
        chunk = {"chunk_tokens": self.chunk_tokens, "layers_per_group": layers, "piece_bytes": piece_bytes}
        staging = {"num_slots": self.num_slots}
        return PrefillNodeConfig.model_validate({"model": Path("none"), "device": device, "chunk": chunk, "staging": staging})

    def moved_bytes(self, num_tokens: int) -> int:
        """Payload of one request."""
        return _moved_bytes(self.model, self.route, num_tokens)

    def tokens_of(self, num_bytes: int) -> int:
        """Tokens of a request of about so many bytes on this route."""
        return max(1, round(num_bytes / self.moved_bytes(1)))

    def name_of(self, case: Case) -> str:
        pieces = "" if case.piece_bytes is None else f", pieces of {readable_bytes(case.piece_bytes)}"
        return f"{readable_bytes(self.moved_bytes(case.num_tokens))}, {case.in_flight} in flight{pieces}"

    def pool_pages(self, shard: Shard) -> int:
        """Room for the largest round, and one request more, so that pages differ from round to round."""
        return max((case.in_flight + 1) * -(-case.num_tokens // shard.page_size) for case in self.cases)


@cache
def _moved_bytes(model: str, route: Route, num_tokens: int) -> int:
    layout = MODELS[model]
    tokens, layers = Range(begin=0, end=num_tokens), Range(begin=0, end=layout.num_layers)
    return wire_bytes(layout, route, tokens=tokens, layers=layers, num_tokens=num_tokens, dtype=layout.dtype)


@cache
def _route(model: str, prefill: Shard, decode: Shard) -> Route:
    return next(route for route in routes(MODELS[model], prefill, decode) if not route.prefill_rank)


class PagePicker:
    """A pool, and pages of it in random order for every request of a round."""

    def __init__(self, setting: Setting, shard: Shard, device: str, *, seed: int) -> None:
        self.pool = KVPool(layout=setting.layout, shard=shard, num_pages=setting.pool_pages(shard), device=device)
        self._random = random.Random(seed)
        self.pages: dict[str, list[int]] = {}

    def fill(self, seed: int) -> None:
        """Random bits everywhere."""
        generator = torch.Generator(device=self.pool.device).manual_seed(seed)
        for layer in range(self.pool.layout.num_layers):
            for is_v in (False, True):
                as_words(self.pool.buffer(layer, is_v=is_v)).random_(-(2**15), 2**15, generator=generator)

    def pick(self, request_ids: Sequence[str], num_tokens: int) -> None:
        """Forget the last round's pages, and choose others."""
        each = -(-num_tokens // self.pool.page_size)
        pages = list(range(self.pool.num_pages[0]))
        self._random.shuffle(pages)
        self.pages = {name: pages[i * each : (i + 1) * each] for i, name in enumerate(request_ids)}

    def digest(self, request_id: str, heads: Range, num_tokens: int) -> str:
        """Of these heads of all tokens of a request, in their order, in every layer."""
        size = self.pool.page_size
        pages = torch.tensor(self.pages[request_id], device=self.pool.device)
        slots = (pages[:, None] * size + torch.arange(size, device=self.pool.device)).view(-1)[:num_tokens]
        parts = (
            as_words(part[:, heads.begin : heads.end].contiguous())
            for layer in range(self.pool.layout.num_layers)
            for part in self.pool.read(layer, slots)
        )
        state = xxhash.xxh3_64()
        if self.pool.device.type == "cpu":
            for part in parts:
                state.update(part.numpy().data)
        else:
            state.update(torch.stack([_mixed(part) for part in parts]).cpu().numpy().data)
        return state.hexdigest()


def _mixed(words: Tensor) -> Tensor:
    """64 bits, left on the device, in which every byte and its place counts: copying all of it to the host would take seconds."""
    flat = words.reshape(-1).view(torch.int64)
    mixed = (flat + torch.arange(1, len(flat) + 1, device=flat.device)) * -0x61C8864680B583EB
    mixed ^= mixed >> 29
    return ((mixed * 0x1B873593) ^ (mixed >> 32)).sum()
