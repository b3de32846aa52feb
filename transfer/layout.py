"""Geometry: the KV of a model, its shards on the ranks, and which rank sends which part to which other rank.

Pure and exact: no torch, no sockets, no clock. Both sides of a transfer ask this module for all sizes and ranges, so neither side
has to send them.

- `KVLayout` describes the KV of one token of a model, independent of any shard.
- `Shard` describes one rank's shard: tensor parallel (TP) and pipeline parallel (PP) size and rank, page size, dtype, order.
- `routes()` intersects two shardings: every (layer, head) of every decode rank is written exactly once.
- `wire_buffers()` lays a chunk of a route out as contiguous bytes, independent of both pools.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from typing import Final

from transfer.errors import LayoutError

MAX_LAYERS: Final = 4096
MAX_KV_HEADS: Final = 65536
MAX_RANKS: Final = 1024
"""Limits of a peer's description: far above every model and instance, and `routes()` still takes seconds at most."""


class DType(StrEnum):
    """Element type of KV. The value is torch's name."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    INT8 = "int8"

    @classmethod
    def _missing_(cls, value: object) -> DType | None:
        """Accept the names that vLLM has for 8-bit floats."""
        return cls.FLOAT8_E4M3 if value in ("fp8", "fp8_e4m3") else None

    @property
    def num_bytes(self) -> int:
        return _DTYPE_BYTES[self]


_DTYPE_BYTES = {DType.FLOAT32: 4, DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.FLOAT8_E4M3: 1, DType.INT8: 1}


class LayerKind(StrEnum):
    """How a layer keeps the data that attention needs later."""

    ATTENTION = "attention"  # MHA or GQA: K and V per KV head
    MLA = "mla"  # one latent per token, the same on every TP rank
    SLIDING_WINDOW = "sliding_window"  # as ATTENTION, but only the last `window_tokens` are ever read
    CHUNKED_LOCAL = "chunked_local"  # as ATTENTION, but a token reads only its own chunk: every `window_tokens`, one begins
    RECURRENT_STATE = "recurrent_state"  # a fixed-size state per request and head, none per token


LOCAL_KINDS: Final = (LayerKind.SLIDING_WINDOW, LayerKind.CHUNKED_LOCAL)
"""Kinds whose earlier tokens are not read any more."""


def first_read_token(token: int, window_tokens: int, *, is_chunked: bool) -> int:
    """Return the first token that attention reads when it computes `token`.

    Args:
        window_tokens: Tokens of the sliding window or of a chunk; 0 means that attention reads all tokens.
    """
    if is_chunked:
        return max(0, token - token % window_tokens)
    return max(0, token - window_tokens + 1) if window_tokens else 0


class TokenOrder(StrEnum):
    """Order of the dimensions inside a page."""

    NHD = "NHD"  # [page, token, head, dim]
    HND = "HND"  # [page, head, token, dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Half-open range [begin, end) of tokens, layers or heads; may be empty."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin <= self.end:
            raise LayoutError(f"span [{self.begin}, {self.end}) must have 0 <= begin <= end")

    def __len__(self) -> int:
        return self.end - self.begin

    def __contains__(self, index: int) -> bool:
        return self.begin <= index < self.end

    def intersect(self, other: Range) -> Range:
        """Return the common part, or an empty range at the larger begin."""
        begin = max(self.begin, other.begin)
        return Range(begin=begin, end=max(begin, min(self.end, other.end)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShard:
    """The tokens of one rank with decode context parallelism (DCP): interleaves `index`, `index + size`, and so on.

    An interleave is `interleave_tokens` consecutive tokens of a request. The shard numbers its tokens from 0 on, without gaps.
    Any consecutive tokens of a request are therefore consecutive in the shard.

    Source: vLLM 0.32, ``v1/attention/backends/utils.py`` (`get_dcp_local_seq_lens`) and ``v1/worker/gpu/block_table.py``.
    """

    size: int
    index: int
    interleave_tokens: int

    def count(self, num_tokens: int) -> int:
        """Return the number of a request's first `num_tokens` tokens that are in the shard."""
        rounds, rest = divmod(num_tokens, self.size * self.interleave_tokens)
        return rounds * self.interleave_tokens + min(max(0, rest - self.index * self.interleave_tokens), self.interleave_tokens)

    def token(self, number: int) -> int:
        """Return the request's token that has this number in the shard."""
        rounds, rest = divmod(number, self.interleave_tokens)
        return (rounds * self.size + self.index) * self.interleave_tokens + rest


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """KV of one layer.

    Args:
        num_kv_heads: KV heads of the whole model in this layer (1 for MLA: the latent is one shared "head").
        k_head_dim: Elements of K per token and head (MLA: latent plus rotary part; recurrent: elements of state per head).
        v_head_dim: Elements of V per token and head; 0 without a second buffer (MLA, recurrent).
        window_tokens: Tokens that a sliding window layer can still read, or tokens of a chunk; 0 for the other kinds.
        dtype: Element type that the layer has in every pool and on the wire. None leaves it to the pool. The model decides the
            precision of a recurrent state, because the error of each step goes into all later ones. Layers of the other kinds
            are `int8` if their rows contain other values than elements, for example quantised values and their scales. Such rows
            are moved byte by byte, and have a multiple of 4 bytes, so that the layers behind them begin on their elements.
    """

    kind: LayerKind = LayerKind.ATTENTION
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window_tokens: int = 0
    dtype: DType | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_kv_heads <= MAX_KV_HEADS:
            raise LayoutError(f"num_kv_heads is {self.num_kv_heads}; it must be at least 1 and at most {MAX_KV_HEADS}")
        if self.k_head_dim < 1 or self.v_head_dim < 0:
            raise LayoutError(f"head dims are K {self.k_head_dim}, V {self.v_head_dim}; K must be positive and V not negative")
        if self.kind is LayerKind.MLA and (self.num_kv_heads != 1 or self.v_head_dim != 0):
            raise LayoutError(f"an MLA layer has one latent and no V; got {self.num_kv_heads} heads and V dim {self.v_head_dim}")
        if self.kind is LayerKind.RECURRENT_STATE and self.v_head_dim != 0:
            raise LayoutError(f"a recurrent layer has one state buffer; got V dim {self.v_head_dim}, must be 0")
        if (self.kind in LOCAL_KINDS) != (self.window_tokens > 0):
            raise LayoutError(
                f"window_tokens is {self.window_tokens} for kind {self.kind}; only {' and '.join(LOCAL_KINDS)} have one, above 0"
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", DType(self.dtype))
            if self.kind is not LayerKind.RECURRENT_STATE and self.dtype is not DType.INT8:
                raise LayoutError(
                    f"dtype of a layer of kind {self.kind} is {self.dtype}; it must be None or int8 (rows of bytes)"
                )
            if self.kind is not LayerKind.RECURRENT_STATE and (self.k_head_dim % 4 or self.v_head_dim % 4):
                raise LayoutError(
                    f"rows of a layer of kind {self.kind} have {self.k_head_dim} and {self.v_head_dim} bytes; they must be "
                    "multiples of 4"
                )

    @property
    def num_buffers(self) -> int:
        """Buffers of this layer: K and V, or one."""
        return 2 if self.v_head_dim else 1

    @property
    def is_chunked(self) -> bool:
        return self.kind is LayerKind.CHUNKED_LOCAL

    def first_travelling_token(self, num_tokens: int) -> int:
        """Return the first token of a prompt that travels: decode computes the last token again, which reads from there."""
        return first_read_token(num_tokens - 1, self.window_tokens, is_chunked=self.is_chunked)

    def shortest_prompt(self, first_token: int) -> int:
        """Return the tokens of the shortest prompt of which no token before `first_token` travels. The kind is a local one."""
        if self.is_chunked:
            return -(-first_token // self.window_tokens) * self.window_tokens + 1
        return first_token + self.window_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The KV of a model before sharding: one `LayerSpec` per layer, and the dtype that the model computes it in."""

    layers: tuple[LayerSpec, ...]
    dtype: DType

    def __post_init__(self) -> None:
        if not self.layers:
            raise LayoutError("layers is empty; a model has at least one layer")
        if len(self.layers) > MAX_LAYERS:
            raise LayoutError(f"layers has {len(self.layers)} entries; a model has at most {MAX_LAYERS}")
        object.__setattr__(self, "dtype", DType(self.dtype))

    def __hash__(self) -> int:
        # Sizes are cached by layout and needed for every request. Hashing 80 layers would take longer than computing most sizes.
        # The comparison of cached keys finds layouts that differ only in between.
        return hash((len(self.layers), self.layers[0], self.layers[-1], self.dtype))

    @classmethod
    def uniform(
        cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: DType, v_head_dim: int | None = None
    ) -> KVLayout:
        """Return the layout of a plain MHA or GQA model (Llama, Qwen3)."""
        if not 1 <= num_layers <= MAX_LAYERS:
            raise LayoutError(f"num_layers is {num_layers}; it must be at least 1 and at most {MAX_LAYERS}")
        spec = LayerSpec(
            num_kv_heads=num_kv_heads, k_head_dim=head_dim, v_head_dim=head_dim if v_head_dim is None else v_head_dim
        )
        return cls(layers=(spec,) * num_layers, dtype=dtype)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def fields(self) -> dict[str, str]:
        """Return the values that must be equal on both sides, as name -> text; run-length coded over layers."""
        named = {"dtype": str(self.dtype), "num_layers": str(len(self.layers))}
        runs: list[list[int]] = []
        for index, spec in enumerate(self.layers):
            if runs and self.layers[runs[-1][0]] == spec:
                runs[-1][1] = index + 1
            else:
                runs.append([index, index + 1])
        for begin, end in runs:
            spec = self.layers[begin]
            dims = f"kv_heads={spec.num_kv_heads} k_dim={spec.k_head_dim} v_dim={spec.v_head_dim}"
            own_dtype = f" dtype={spec.dtype}" if spec.dtype is not None else ""
            named[f"layers[{begin}:{end}]"] = f"{spec.kind} {dims} window={spec.window_tokens}{own_dtype}"
        return named

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal exactly if `fields()` are; stable across versions of kvferry."""
        canonical = json.dumps(self.fields(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def differences(self, other: KVLayout) -> list[str]:
        """Return each differing field as one phrase with both values; empty if the two can be joined."""
        return named_differences(self.fields(), other.fields())


def named_differences(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Return ``name: ours != theirs`` for each name whose values differ or that one side lacks."""
    return [
        f"{name}: {ours.get(name, 'absent')} != {theirs.get(name, 'absent')}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's shard of a `KVLayout`.

    Args:
        tp_size: Tensor parallel degree.
        tp_rank: This rank's index in it.
        pp_size: Pipeline parallel degree.
        pp_rank: This rank's stage.
        page_size: Tokens per page of this rank's pool.
        dtype: Element type of this rank's pool; None means the layout's.
        order: Order of the dimensions inside a page.
        stage_layers: Layers per pipeline stage, if they are not spread evenly (sum = layers of the model).
        dcp_size: Decode context parallel degree. Of the consecutive TP ranks that share a KV head, each keeps a `TokenShard`. All
            layers then keep K and V, or a latent, of every token.
        interleave_tokens: Tokens of an interleave; without effect if `dcp_size` is 1.
    """

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    page_size: int = 16
    dtype: DType | None = None
    order: TokenOrder = TokenOrder.NHD
    stage_layers: tuple[int, ...] | None = None
    dcp_size: int = 1
    interleave_tokens: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)):
            if size < 1:
                raise LayoutError(f"{name}_size is {size}; it must be at least 1")
            if not 0 <= rank < size:
                raise LayoutError(f"{name}_rank is {rank}; with {name}_size {size} it must be in [0, {size})")
        if self.num_ranks > MAX_RANKS:
            raise LayoutError(f"tp_size is {self.tp_size}, pp_size {self.pp_size}; an instance has at most {MAX_RANKS} ranks")
        if self.page_size < 1:
            raise LayoutError(f"page_size is {self.page_size}; it must be at least 1 token")
        if self.stage_layers is not None and len(self.stage_layers) != self.pp_size:
            raise LayoutError(f"stage_layers has {len(self.stage_layers)} entries; pp_size is {self.pp_size}")
        if self.stage_layers is not None and min(self.stage_layers) < 0:
            raise LayoutError(f"stage_layers is {self.stage_layers}; no stage can have fewer than 0 layers")
        if self.dcp_size < 1 or self.tp_size % self.dcp_size:
            raise LayoutError(f"dcp_size is {self.dcp_size}; it must divide tp_size, {self.tp_size}")
        if self.interleave_tokens < 1:
            raise LayoutError(f"interleave_tokens is {self.interleave_tokens}; it must be at least 1")

    @property
    def dcp_rank(self) -> int:
        return self.tp_rank % self.dcp_size

    @property
    def rank(self) -> int:
        """Index of this rank in its instance: stage-major, as engines number them."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def num_ranks(self) -> int:
        return self.pp_size * self.tp_size

    def at(self, rank: int) -> Shard:
        """Return the shard of another rank of the instance."""
        if not 0 <= rank < self.num_ranks:
            raise LayoutError(f"rank is {rank}; the instance has {self.num_ranks} ranks")
        return replace(self, tp_rank=rank % self.tp_size, pp_rank=rank // self.tp_size)

    def pool_dtype(self, layout: KVLayout) -> DType:
        return layout.dtype if self.dtype is None else DType(self.dtype)

    def layer_dtype(self, layout: KVLayout, layer: int) -> DType:
        """Return the element type in which this rank keeps the global layer `layer`."""
        return layout.layers[layer].dtype or self.pool_dtype(layout)

    def layers(self, layout: KVLayout) -> Range:
        """Return the global layers of this rank's stage. Without `stage_layers`, the first stages
        take one more on a remainder."""
        return self.stages(layout)[self.pp_rank]

    def stages(self, layout: KVLayout) -> tuple[Range, ...]:
        """Return the global layers of every stage. Raise LayoutError if the stages do not make up the model."""
        if self.pp_size > layout.num_layers:
            raise LayoutError(f"pp_size is {self.pp_size}; a model of {layout.num_layers} layers has at most as many stages")
        if self.stage_layers is not None:
            ends = tuple(accumulate(self.stage_layers))
            if ends[-1] != layout.num_layers:
                shown = ", ".join(map(str, self.stage_layers[:16])) + (", ..." if self.pp_size > 16 else "")
                raise LayoutError(f"stage_layers ({shown}) add up to {ends[-1]}; the model has {layout.num_layers}")
        else:
            base, extra = divmod(layout.num_layers, self.pp_size)
            ends = tuple(stage * base + min(stage, extra) for stage in range(1, self.pp_size + 1))
        return tuple(Range(begin=begin, end=end) for begin, end in zip((0, *ends), ends, strict=False))

    def check_dcp(self, layout: KVLayout) -> None:
        """Raise LayoutError if decode context parallelism cannot divide the tokens of a layer."""
        if self.dcp_size == 1:
            return
        for layer, spec in enumerate(layout.layers):
            if spec.kind not in (LayerKind.ATTENTION, LayerKind.MLA):
                raise LayoutError(f"dcp_size is {self.dcp_size}; it must be 1, because layer {layer} is of kind {spec.kind}")
            if self.dcp_size > (most := max(1, self.tp_size // spec.num_kv_heads)):
                raise LayoutError(
                    f"dcp_size is {self.dcp_size}; it can be at most {most}: layer {layer} has {spec.num_kv_heads} KV heads on "
                    f"{self.tp_size} TP ranks"
                )

    def heads(self, num_kv_heads: int) -> Range:
        """Return the global KV heads of this rank. With more ranks than heads, consecutive ranks share one (divide, never
        modulo)."""
        return _heads_of(self.tp_rank, self.tp_size, num_kv_heads)


def _heads_of(tp_rank: int, tp_size: int, num_heads: int) -> Range:
    begin = tp_rank * num_heads // tp_size
    return Range(begin=begin, end=begin + 1 if tp_size > num_heads else (tp_rank + 1) * num_heads // tp_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSlice:
    """`count` heads, rank-local on both sides: source [source_start, +count) goes to target [target_start, +count)."""

    source_start: int
    target_start: int
    count: int

    def __post_init__(self) -> None:
        if min(self.source_start, self.target_start) < 0 or self.count < 1:
            raise LayoutError(f"head slice {self.source_start}->{self.target_start} of {self.count} heads is empty or negative")

    @property
    def source(self) -> Range:
        """Rank-local heads of the sending rank."""
        return Range(begin=self.source_start, end=self.source_start + self.count)

    @property
    def target(self) -> Range:
        """Rank-local heads of the receiving rank."""
        return Range(begin=self.target_start, end=self.target_start + self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The layers and the head slice that one prefill rank sends to one decode rank.

    `index` is the route's place in the list that `routes()` returns, the same on both sides. It names the writer of a chunk.
    Models that alternate between kinds of layers have different numbers of KV heads in them. `num_kv_heads` selects the layers of
    the span; None means all. There is one route for each number, not for each run of layers, because a route is a write per
    chunk.

    With decode context parallelism, `token_shard` selects the tokens that both ranks keep; None means all. Payloads and page
    tables count these tokens only, see `own_tokens`.
    """

    index: int
    prefill_rank: int
    decode_rank: int
    layers: Range
    heads: HeadSlice
    num_kv_heads: int | None = None
    token_shard: TokenShard | None = None

    def own_count(self, num_tokens: int) -> int:
        """Return the number of a request's first `num_tokens` tokens that travel on this route."""
        return num_tokens if self.token_shard is None else self.token_shard.count(num_tokens)

    def own_tokens(self, tokens: Range) -> Range:
        """Return those of a request's `tokens` that travel on this route, by their numbers in its `token_shard`."""
        if self.token_shard is None:
            return tokens
        return Range(begin=self.own_count(tokens.begin), end=self.own_count(tokens.end))

    def layers_in(self, layout: KVLayout, layers: Range) -> Sequence[int]:
        """Return those of `layers` that travel on this route."""
        common = self.layers.intersect(layers)
        within = range(common.begin, common.end)
        if self.num_kv_heads is None:
            return within
        return [layer for layer in within if layout.layers[layer].num_kv_heads == self.num_kv_heads]


def routes(layout: KVLayout, prefill: Shard, decode: Shard) -> tuple[Route, ...]:
    """Return all routes between two instances of one model.

    Every (layer, head, token) of every decode rank is covered exactly once. If several prefill ranks hold the same, one of them
    sends it, and the load is spread evenly over the replicas. The rank numbers in `prefill` and `decode` do not matter.

    The two must pass `dcp_differences` and, with the layout, `Shard.check_dcp`.
    """
    found: list[Route] = []
    wanted, held = decode.stages(layout), prefill.stages(layout)
    for decode_rank in range(decode.num_ranks):
        target = decode.at(decode_rank)
        for stage, held_layers in enumerate(held):
            common = wanted[target.pp_rank].intersect(held_layers)
            spans = _spans_of_equal_heads(layout, common)
            for num_heads, layers in spans.items():
                for prefill_rank, heads, token_shard in _sources(num_heads, prefill, stage, target):
                    found.append(
                        Route(
                            index=len(found),
                            prefill_rank=prefill_rank,
                            decode_rank=decode_rank,
                            layers=layers,
                            heads=heads,
                            num_kv_heads=num_heads if len(spans) > 1 else None,
                            token_shard=token_shard,
                        )
                    )
    return tuple(found)


@lru_cache(maxsize=64)  # called for each request, with few pairs of instances
def most_routes(layout: KVLayout, prefill: Shard, decode: Shard) -> int:
    """Return the most routes that one rank of either instance has."""
    every = routes(layout, prefill, decode)
    counts = Counter((False, route.prefill_rank) for route in every) + Counter((True, route.decode_rank) for route in every)
    return max(counts.values())


def _spans_of_equal_heads(layout: KVLayout, layers: Range) -> dict[int, Range]:
    """Return for each number of KV heads, by first layer, the range from the first to behind the last layer that has it."""
    spans: dict[int, Range] = {}
    for index in range(layers.begin, layers.end):
        num_heads = layout.layers[index].num_kv_heads
        first = spans[num_heads].begin if num_heads in spans else index
        spans[num_heads] = Range(begin=first, end=index + 1)
    return spans


def _sources(num_heads: int, prefill: Shard, stage: int, target: Shard) -> list[tuple[int, HeadSlice, TokenShard | None]]:
    """Return the prefill ranks of one stage that cover the target's heads and tokens, one replica for each."""
    wanted = target.heads(num_heads)
    holders: dict[tuple[int, int], list[int]] = {}
    for tp_rank in _ranks_with(wanted, prefill.tp_size, num_heads):
        first_head = _heads_of(tp_rank, prefill.tp_size, num_heads).begin
        holders.setdefault((first_head, tp_rank % prefill.dcp_size), []).append(tp_rank)
    sources: list[tuple[int, HeadSlice, TokenShard | None]] = []
    for (_, dcp_rank), replicas in holders.items():
        if (dcp_rank - target.dcp_rank) % min(prefill.dcp_size, target.dcp_size):
            continue  # the two have no token in common
        held = _heads_of(replicas[0], prefill.tp_size, num_heads)
        part = held.intersect(wanted)
        # The decode ranks that want one head are consecutive; spreading them proportionally over its replicas keeps the load
        # within one of even, and joins equal cuts rank by rank.
        sharers = _sharers(num_heads, part.begin, target)
        replica = replicas[(target.tp_rank - sharers.begin) * len(replicas) // len(sharers)]
        heads = HeadSlice(source_start=part.begin - held.begin, target_start=part.begin - wanted.begin, count=len(part))
        sources.append((stage * prefill.tp_size + replica, heads, _common_tokens(prefill, dcp_rank, target)))
    return sources


def _common_tokens(prefill: Shard, dcp_rank: int, target: Shard) -> TokenShard | None:
    """Return the tokens of a prefill rank that the target keeps too: all those of the rank with the larger DCP size."""
    finer, index = (prefill, dcp_rank) if prefill.dcp_size > target.dcp_size else (target, target.dcp_rank)
    if finer.dcp_size == 1:
        return None
    return TokenShard(size=finer.dcp_size, index=index, interleave_tokens=finer.interleave_tokens)


def dcp_differences(prefill: Shard, decode: Shard) -> list[str]:
    """Return why tokens cannot travel between the two, as phrases with both values; empty if they can.

    With different DCP sizes, a rank of the smaller one keeps the interleaves of several ranks of the other. Such a part is copied
    as whole pages, so an interleave must be whole pages there.
    """
    coarser, finer = sorted((prefill, decode), key=lambda side: side.dcp_size)
    sizes = f"dcp_size: {prefill.dcp_size} != {decode.dcp_size}"
    if finer.dcp_size % coarser.dcp_size:
        return [f"{sizes} (one must divide the other)"]
    if coarser.dcp_size > 1 and coarser.interleave_tokens != finer.interleave_tokens:
        return [f"interleave_tokens: {prefill.interleave_tokens} != {decode.interleave_tokens} (DCP on both sides)"]
    if coarser.dcp_size != finer.dcp_size and finer.interleave_tokens % coarser.page_size:
        return [
            f"{sizes} (the interleave of {finer.interleave_tokens} tokens must then be a multiple of the other side's page_size, "
            f"{coarser.page_size})"
        ]
    return []


def _ranks_with(heads: Range, tp_size: int, num_heads: int) -> range:
    """Return the TP ranks that hold any of `heads`, which are not empty."""
    end = -(-heads.end * tp_size // num_heads)
    if tp_size > num_heads:
        return range(-(-heads.begin * tp_size // num_heads), end)
    return range(-(-(heads.begin + 1) * tp_size // num_heads) - 1, end)


def _sharers(num_heads: int, head: int, target: Shard) -> Range:
    """Return the decode TP ranks that want `head`, including the target: all r with r * heads // tp == head."""
    if target.tp_size <= num_heads:
        return Range(begin=target.tp_rank, end=target.tp_rank + 1)
    begin = -(-head * target.tp_size // num_heads)
    return Range(begin=begin, end=-(-(head + 1) * target.tp_size // num_heads))


def wire_dtype(layout: KVLayout, prefill: Shard, decode: Shard) -> DType:
    """Return the narrower of both pools' dtypes (prefill's on a tie). The other side converts inside gather or scatter.

    Layers that have their own dtype travel in that.
    """
    ours, theirs = prefill.pool_dtype(layout), decode.pool_dtype(layout)
    if ours is not theirs and DType.INT8 in (ours, theirs):
        raise LayoutError(f"dtype {ours} -> {theirs}: int8 KV carries no scale here and is moved only to int8")
    return theirs if theirs.num_bytes < ours.num_bytes else ours


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBuffer:
    """One buffer of a chunk on the wire: `[token][head][dim]`, contiguous, on a multiple of its element size.

    Args:
        layer: Global layer.
        is_v: Whether this is V; otherwise K, an MLA latent, or a recurrent state.
        tokens: Tokens of the request in it (one pseudo token for a recurrent state).
        row_bytes: Bytes of one token: heads x dim x element.
        offset_bytes: Its begin, from the start of the grant.
    """

    layer: int
    is_v: bool
    tokens: Range
    row_bytes: int
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) * self.row_bytes


def wire_buffers(
    layout: KVLayout, route: Route, *, tokens: Range, layers: Range, num_tokens: int, dtype: DType
) -> tuple[WireBuffer, ...]:
    """Return the buffers of a chunk's part on `route`, in their order in its grant: ``[buffer (layer x K/V)][token][head][dim]``.

    Layers with sliding windows or chunks carry only tokens of the prompt's last window or chunk. A recurrent state travels once,
    with the request's last tokens. Empty if chunk and route share nothing.

    Args:
        tokens, layers: Ranges of the chunk; layers are global. Tokens are those of `Route.own_tokens`.
        num_tokens: Tokens of the whole prompt, likewise.
        dtype: Element type on the wire, see `wire_dtype`.
    """
    buffers: list[WireBuffer] = []
    offset = 0
    for layer in route.layers_in(layout, layers):
        spec = layout.layers[layer]
        travelling = _travelling_tokens(spec, tokens, num_tokens)
        if not len(travelling):
            continue
        element = (spec.dtype or dtype).num_bytes
        offset = -(-offset // element) * element  # only a layer with its own dtype can end elsewhere
        for is_v in (False, True)[: spec.num_buffers]:
            row_bytes = route.heads.count * (spec.v_head_dim if is_v else spec.k_head_dim) * element
            buffers.append(WireBuffer(layer=layer, is_v=is_v, tokens=travelling, row_bytes=row_bytes, offset_bytes=offset))
            offset += buffers[-1].num_bytes
    return tuple(buffers)


def wire_bytes(layout: KVLayout, route: Route, *, tokens: Range, layers: Range, num_tokens: int, dtype: DType) -> int:
    """Return the payload of this part of a chunk in bytes; 0 where chunk and route share nothing."""
    return payload_rates(layout, route, layers, dtype).num_bytes(tokens, num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WindowRate:
    """Payload of the layers that keep the same last tokens of a prompt.

    Args:
        spec: One of these layers.
        token_bytes: Bytes of one token in these layers.
        token_buffers: Buffers of these layers.
    """

    spec: LayerSpec
    token_bytes: int
    token_buffers: int

    def first_token(self, num_tokens: int) -> int:
        """Return the first token that travels, for a prompt of `num_tokens`."""
        return self.spec.first_travelling_token(num_tokens)

    def count(self, tokens: Range, num_tokens: int) -> int:
        """Return the number of `tokens` that travel."""
        return max(0, tokens.end - max(tokens.begin, self.first_token(num_tokens)))


class PayloadRates:
    """The payload of some layers on one route, for any part of any prompt. Create one with `payload_rates`.

    All tokens are those of `Route.own_tokens`.
    Recurrent states travel with the last token of a prompt, and each window or chunk with the tokens that it still reaches.
    """

    def __init__(self, layout: KVLayout, route: Route, layers: Range, dtype: DType) -> None:
        self._layout, self._route, self._layers, self._dtype = layout, route, layers, dtype
        of_window: dict[tuple[int, bool], list[LayerSpec]] = {}
        self._num_states = 0
        for layer in route.layers_in(layout, layers):
            spec = layout.layers[layer]
            if spec.kind is LayerKind.RECURRENT_STATE:
                self._num_states += 1
            else:
                of_window.setdefault((spec.window_tokens, spec.is_chunked), []).append(spec)
        self._windows = [
            _WindowRate(
                spec=specs[0],
                token_bytes=route.heads.count * sum(_head_bytes(spec, dtype) for spec in specs),
                token_buffers=sum(spec.num_buffers for spec in specs),
            )
            for specs in of_window.values()
        ]

    def num_bytes(self, tokens: Range, num_tokens: int) -> int:
        """Return the bytes of `tokens` of a prompt of `num_tokens`."""
        if self._num_states and tokens.end == num_tokens:
            last = wire_buffers(
                self._layout, self._route, tokens=tokens, layers=self._layers, num_tokens=num_tokens, dtype=self._dtype
            )[-1]
            return last.offset_bytes + last.num_bytes
        return sum([rate.count(tokens, num_tokens) * rate.token_bytes for rate in self._windows])

    def num_slices(self, tokens: Range, num_tokens: int) -> int:
        """Return the writes that `tokens` would take as token x layer x K/V slices."""
        num_states = self._num_states if tokens.end == num_tokens else 0
        return num_states + sum([rate.count(tokens, num_tokens) * rate.token_buffers for rate in self._windows])

    def first_token(self, num_tokens: int) -> int:
        """Return the first token of a prompt that has a payload; `num_tokens` if none has. All later tokens have one."""
        return min([rate.first_token(num_tokens) for rate in self._windows], default=num_tokens - bool(self._num_states))


@lru_cache(maxsize=4096)  # called for each route of each request; one entry for each group of layers of any chunk
def payload_rates(layout: KVLayout, route: Route, layers: Range, dtype: DType) -> PayloadRates:
    """Return the payload rates of `layers` on `route`; `dtype` is the element type on the wire."""
    return PayloadRates(layout, route, layers, dtype)


def _head_bytes(spec: LayerSpec, dtype: DType) -> int:
    """Return the bytes of one token and head."""
    return (spec.k_head_dim + spec.v_head_dim) * (spec.dtype or dtype).num_bytes


def _travelling_tokens(spec: LayerSpec, tokens: Range, num_tokens: int) -> Range:
    if spec.kind is LayerKind.RECURRENT_STATE:
        return Range(begin=0, end=1) if tokens.end == num_tokens else Range(begin=0, end=0)
    if spec.kind in LOCAL_KINDS:
        return tokens.intersect(Range(begin=spec.first_travelling_token(num_tokens), end=num_tokens))
    return tokens
