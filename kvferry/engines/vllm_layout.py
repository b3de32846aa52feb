"""Convert vLLM's KV cache to kvferry's layout, shard and views of tensors. Nothing is copied.

vLLM 0.32 and 0.33 pass a connector one tensor per layer, ``[blocks, heads, block_size, content]`` with any strides. The order in
memory is a setting, mostly ``LBNHC`` or ``LBHNC``. The content of a block and head depends on the backend:

- on GPUs, K of each token and V after it: ``[token, K | V]``;
- MLA, on all devices: one head, whose content is the latent: ``[token, latent]``. For ``fp8_ds_mla`` and ``nvfp4_ds_mla`` it is
  a row of quantised values, their scales and the rotary part: ``[token, 656 or 352 bytes]``;
- the indexer of sparse attention (DeepSeek-V3.2, GLM-5), on NVIDIA GPUs: the values of all tokens of the block are one run of
  memory, ``[token, 128 bytes]``, and the scales follow, ``[token, 4 bytes]``;
- recurrent states: bytes, see `kvferry.engines.vllm_states`;
- ``fp8_per_token_head`` and ``int8_per_token_head``, ``TRITON_ATTN``: ``[token, K | scale of K | V | scale of V]``;
- attention on a CPU (``CPU_ATTN``): the content of all tokens of the block is one run of memory. K comes first, as
  ``[dim, token]``, then V as ``[token, dim]``. This was verified with vLLM 0.32's own kernel for its instruction sets ``vec`` and
  ``vec16`` of x86. The set ``amx``, for bfloat16, stores K and V in tiles of pairs. It is rejected, and so are the sets of other
  machines, which were not verified. 8-bit floats are packed like other types.

Source: vLLM 0.32.0 and 0.33.0, ``v1/kv_cache_interface.py``, ``v1/kv_cache_layout.py``, ``v1/attention/backends/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from kvferry.engines.vllm_facts import CHUNKED_SPEC, INDEXER_ROWS, ROW_FORMATS, LayerFacts, TableFacts, VllmFacts
from kvferry.engines.vllm_states import STATE_SPEC, check_state, parts_of, state_views
from kvferry.engines.vllm_windows import WindowTable
from transfer.errors import ConfigError, LayoutError
from transfer.layer_groups import NO_PAGE, GroupKind, LayerGroup, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, TokenOrder
from transfer.pool.kv_pool import TORCH_DTYPES, KVPool, LayerBuffers, PoolView

NULL_BLOCK: Final = 0
"""Block id in a block table in place of each block that a window or chunk has passed."""

PACKED_BACKENDS: Final = ("CPU_ATTN",)
PACKED_ISAS: Final = ("vec", "vec16")
DENSE_BACKENDS: Final = (
    "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV",
)  # fmt: skip
LATENT_BACKENDS: Final = (
    "CPU_MLA", "AMX_MLA", "TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA", "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120", "FLASHINFER_MLA_SPARSE_SM90",
)  # fmt: skip
ROW_BACKENDS: Final = ("TRITON_ATTN",)
"""Backends whose rows have a scale of K and a scale of V for each head."""
INDEXER_BACKENDS: Final = ("DEEPSEEK_V32_INDEXER",)

_LATENT_SPECS: Final = ("MLAAttentionSpec", "SlidingWindowMLASpec")
"""Specs whose layers are the same on all tensor parallel ranks."""
_KNOWN_SPECS: Final = ("FullAttentionSpec", "SlidingWindowSpec", CHUNKED_SPEC, *_LATENT_SPECS, STATE_SPEC)
_WHY_NOT: Final = {
    "CrossAttentionSpec": "attends to an encoder's output",
    "EncoderOnlyAttentionSpec": "is an encoder's",
    "SinkFullAttentionSpec": "has attention sinks in its cache",
    "RSWASpec": "drops blocks between the prompt and a window",
}
_PLAIN_DTYPES: Final = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
_FLOAT8_SETTINGS: Final = ("fp8", "fp8_e4m3")


class WindowLayers(StrEnum):
    """The part of layers with a sliding window or chunks that moves. Both sides must use the same."""

    WHOLE = "whole"
    """Every token, as for full attention. Works if vLLM's hybrid KV cache manager is off."""

    LAST_WINDOW = "last_window"
    """The last window of the prompt, as in nodes with the embedded engine. If vLLM's hybrid KV cache manager is off, blocks that
    vLLM considers whole stay partly unwritten. Then a decode instance must not keep blocks for later prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLayout:
    """One rank of a vLLM instance. Made by `describe`.

    Args:
        layout: KV of the whole model, without layers that use the KV of another one.
        shard: The rank's shard; a page is a block, and page numbers are block ids. Its page size is that of the shortest blocks.
        layers: The rank's layers, in the layout's order. A state is several layers of the layout, see `parts_of`.
        kv_scales: For 8-bit floats, scales of K and V for each layer of the layout; otherwise empty.
        groups: The layers of each page table: a group of `layer_groups(layout)`, or a part of one that vLLM gives a block table
            of its own, or that has an element type of its own.
        block_groups: For each of `groups`, the index of its block table among those of a vLLM request.
        page_sizes: For each of `groups`, the tokens of a block on this rank.
        window_tables: Block tables without blocks for tokens that a window or chunk has passed.
        num_blocks: Blocks of each group.
        shared_layers: Layers that use the tensors of another one.
    """

    layout: KVLayout
    shard: Shard
    layers: tuple[LayerFacts, ...]
    kv_scales: tuple[tuple[float, float], ...]
    groups: tuple[LayerGroup, ...]
    block_groups: tuple[int, ...]
    page_sizes: tuple[int, ...]
    window_tables: tuple[WindowTable, ...]
    num_blocks: int
    shared_layers: frozenset[str]

    def pool(self, kv_caches: Mapping[str, Tensor]) -> PoolView:
        """Return a view of vLLM's tensors.

        Args:
            kv_caches: The argument of ``register_kv_caches``.

        Raises:
            LayoutError: A tensor is missing or unknown, or its backend stores it in an unknown way; the layer is named.
        """
        wanted = {layer.name for layer in self.layers}
        if missing := sorted(wanted - kv_caches.keys()):
            raise LayoutError(f"layer {missing[0]} has no tensor; vLLM registered {len(kv_caches)}")
        if unknown := sorted(kv_caches.keys() - wanted - self.shared_layers):
            raise LayoutError(f"layer {unknown[0]} has a tensor, but is in none of vLLM's groups of KV caches")
        buffers = [buffer for layer in self.layers for buffer in self._buffers(layer, kv_caches[layer.name])]
        num_pages = (self.num_blocks,) * len(self.groups)
        return PoolView(
            layout=self.layout,
            shard=self.shard,
            buffers=buffers,
            num_pages=num_pages,
            groups=self.groups,
            page_sizes=self.page_sizes,
        )

    @property
    def row_formats(self) -> dict[str, str]:
        """The formats of rows, as a field of the model: two formats can have equally many bytes. Empty without such rows."""
        formats = sorted({layer.row_format for layer in self.layers if layer.row_format})
        return {"engine.kv_rows": ", ".join(formats)} if formats else {}

    @property
    def layer_ends(self) -> dict[str, int]:
        """Number of layers of the layout up to and including each layer of the rank, by name, in the order of the layout."""
        begin = self.shard.layers(self.layout).begin
        counts = [1 if layer.state is None else len(parts_of(layer.state)) for layer in self.layers]
        return {layer.name: begin + end for layer, end in zip(self.layers, accumulate(counts), strict=True)}

    @property
    def state_block_tokens(self) -> int:
        """Tokens of a block of recurrent states; 0 if no layer keeps one. vLLM has one size for all of them."""
        sizes = (size for group, size in zip(self.groups, self.page_sizes, strict=True) if group.kind is GroupKind.STATE)
        return next(sizes, 0)

    def page_tables(self, block_ids: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
        """Return a request's block table for each of `groups`; see `tables_to_read`.

        Args:
            block_ids: ``get_block_ids()`` of the request's blocks: a table for each of vLLM's groups.
        """
        return tuple([NO_PAGE if block == NULL_BLOCK else block for block in block_ids[group]] for group in self.block_groups)

    def tables_to_read(self, tables: Sequence[list[int]], num_tokens: int) -> tuple[list[int], ...]:
        """Return page tables of a request whose first `num_tokens` are computed.

        A state's table has one page: the block of the last token. Blocks of earlier tokens have earlier states, or are free.

        Args:
            tables: Those of `page_tables`.

        Raises:
            LayoutError: vLLM has no block for the state after these tokens.
        """
        return tuple(
            self._state_table(table, page_size, num_tokens) if group.kind is GroupKind.STATE else table
            for group, page_size, table in zip(self.groups, self.page_sizes, tables, strict=True)
        )

    def _state_table(self, table: Sequence[int], page_size: int, num_tokens: int) -> list[int]:
        index = (num_tokens - 1) // page_size
        if index >= len(table) or table[index] == NO_PAGE:
            raise LayoutError(f"vLLM has no block for the state after {num_tokens} tokens; its table has {len(table)} entries")
        return [table[index]]

    def tables_to_fill(self, block_ids: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[int], ...]:
        """Return page tables in which each token that travels has a page; see `page_tables`.

        vLLM has no block for the first token of a window if the window passes it after the prompt, nor for a last token that it
        computes itself. These tokens get the null block, which attention ignores.

        Args:
            num_tokens: Tokens of the prompt.
        """
        tables = self.page_tables(block_ids)
        for group, page_size, table in zip(self.groups, self.page_sizes, tables, strict=True):
            if group.kind is GroupKind.STATE:
                continue
            table += [NULL_BLOCK] * (-(-num_tokens // (page_size * self.shard.dcp_size)) - len(table))
            first = group.first_travelling_token(num_tokens) // page_size
            if table[first] == NO_PAGE:
                table[first] = NULL_BLOCK
        return self.tables_to_read(tables, num_tokens)

    def clear_tail(self, pool: KVPool, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Zero the rest of the last block behind a prompt's tokens, on the device's current stream.

        vLLM zeroes new blocks of a model with states, except those that are loaded. A block of a state in float32, read as
        bfloat16, has NaN, and attention multiplies the elements behind the last token by 0.
        """
        tables = self.page_tables(block_ids)
        for group, page_size, table in zip(self.groups, self.page_sizes, tables, strict=True):
            used = num_tokens % page_size
            if group.kind is GroupKind.STATE or not used:
                continue
            block = table[num_tokens // page_size]
            for layer in group.layers_of(self.layout, self.shard):
                for is_v in (False, True)[: self.layout.layers[layer].num_buffers]:
                    content = pool.buffer(layer, is_v=is_v)[block]
                    content.narrow(0 if self.shard.order is TokenOrder.NHD else 1, used, page_size - used).zero_()

    def first_needed_pages(self, next_token: int) -> tuple[int, ...]:
        """Return for each of `groups` the first page that vLLM keeps if `next_token` is the next token of a step."""
        tables = {table.group for table in self.window_tables}
        return tuple(
            group.first_needed_token(next_token) // page_size if index in tables else 0
            for group, page_size, index in zip(self.groups, self.page_sizes, self.block_groups, strict=True)
        )

    def _buffers(self, layer: LayerFacts, cache: Tensor) -> Iterator[LayerBuffers]:
        """Yield K and V, [blocks, tokens, heads, dim] or [blocks, heads, tokens, dim] in the shard's order, or a state."""
        if layer.state is not None:
            yield from (LayerBuffers(k=part, v=None) for part in state_views(layer.name, layer.state, cache, self.num_blocks))
            return
        k, v = self._views(layer, self._checked(layer, cache))
        if self.shard.order is TokenOrder.NHD:
            k, v = k.transpose(1, 2), None if v is None else v.transpose(1, 2)
        yield LayerBuffers(k=k, v=v)

    def _checked(self, layer: LayerFacts, cache: Tensor) -> Tensor:
        """Return the cache as [blocks, heads, block_size, content], in the pool's element type."""
        element = DType.INT8 if layer.row_format else self.shard.pool_dtype(self.layout)
        if layer.row_format or (element is DType.FLOAT8_E4M3 and cache.dtype is torch.uint8):
            cache = cache.view(TORCH_DTYPES[element])
        content = layer.k_head_dim + layer.v_head_dim
        wanted = (self.num_blocks, layer.num_kv_heads, layer.block_size, content)
        if cache.dim() == 4 and tuple(cache.shape) != wanted and layer.row_format != INDEXER_ROWS:
            cache = _joined(cache, layer.block_size)
        if tuple(cache.shape) != wanted or cache.dtype is not TORCH_DTYPES[element]:
            advice = f"; start vLLM with --block-size {cache.shape[2]}" if layer.row_format == INDEXER_ROWS else ""
            raise LayoutError(
                f"layer {layer.name} has a tensor {cache.dtype} {tuple(cache.shape)}, strides {cache.stride()}; must be "
                f"{TORCH_DTYPES[element]} {wanted} [blocks, heads, tokens, K and V]{advice}"
            )
        return cache

    def _views(self, layer: LayerFacts, cache: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return K and V of a cache, or the latent and None: [blocks, heads, tokens, dim]."""
        if layer.backend in INDEXER_BACKENDS and layer.row_format == INDEXER_ROWS:
            return _indexed(layer, cache)
        if layer.backend in LATENT_BACKENDS and not layer.v_head_dim:
            return cache, None
        if layer.backend in (ROW_BACKENDS if layer.row_format else DENSE_BACKENDS) and layer.v_head_dim:
            k, v = cache.split((layer.k_head_dim, layer.v_head_dim), dim=-1)
            return k, v
        if layer.backend in PACKED_BACKENDS and layer.v_head_dim:
            return _unpacked(layer, cache)
        known = ", ".join((*PACKED_BACKENDS, *DENSE_BACKENDS, *LATENT_BACKENDS, *INDEXER_BACKENDS))
        backend = f"{layer.backend or 'unknown'}{f' and rows of {layer.row_format}' if layer.row_format else ''}"
        raise LayoutError(
            f"layer {layer.name} has the attention backend {backend} with head dims {layer.k_head_dim} and {layer.v_head_dim}, "
            f"which kvferry does not support; supported backends: {known} (the setting --attention-backend)"
        )


def _joined(cache: Tensor, block_size: int) -> Tensor:
    """Join the kernel blocks of each block, if one set of strides can describe the block."""
    num_kernel_blocks, heads, kernel_size, content = cache.shape
    parts = block_size // kernel_size
    if parts < 2 or parts * kernel_size != block_size or num_kernel_blocks % parts:
        return cache
    blocks, tokens = cache.stride(0), cache.stride(2)
    if blocks != kernel_size * tokens:
        raise LayoutError(
            f"vLLM divides its blocks of {block_size} tokens into {parts} for the attention kernel, and their heads lie apart; "
            f"start it with --block-size {kernel_size}"
        )
    shape, strides = (num_kernel_blocks // parts, heads, block_size, content), (parts * blocks, *cache.stride()[1:])
    return cache.as_strided(shape, strides, cache.storage_offset())


def _indexed(layer: LayerFacts, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and scales of an indexer, [blocks, 1, tokens, bytes]. A block has all values before all scales."""
    blocks, heads, tokens, content = cache.shape
    if cache.stride()[2:] != (content, 1):
        raise LayoutError(f"layer {layer.name} has strides {cache.stride()}; the tokens of an indexer's block must be one run")
    outer, offset, dim = cache.stride()[:2], cache.storage_offset(), layer.k_head_dim
    values = cache.as_strided((blocks, heads, tokens, dim), (*outer, dim, 1), offset)
    scales = cache.as_strided((blocks, heads, tokens, layer.v_head_dim), (*outer, layer.v_head_dim, 1), offset + tokens * dim)
    return values, scales


def _unpacked(layer: LayerFacts, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of attention on a CPU, [blocks, heads, tokens, dim]. In K the tokens of an element are adjacent."""
    if layer.isa not in PACKED_ISAS:
        advice = ": start vLLM with --dtype float32 or float16" if layer.isa == "amx" else ""
        raise LayoutError(
            f"layer {layer.name}: attention on this CPU packs its blocks for {layer.isa or 'an unknown instruction set'}, which "
            f"kvferry cannot read; it knows {' and '.join(PACKED_ISAS)}{advice}"
        )
    blocks, heads, tokens, content = cache.shape
    dim = layer.k_head_dim
    if layer.v_head_dim != dim or cache.stride()[2:] != (content, 1):
        raise LayoutError(
            f"layer {layer.name} has head dims {dim} and {layer.v_head_dim}, strides {cache.stride()}; on a CPU the content of a "
            f"block and head must be one run, half of it K"
        )
    outer, offset = cache.stride()[:2], cache.storage_offset()
    k = cache.as_strided((blocks, heads, tokens, dim), (*outer, 1, tokens), offset)
    v = cache.as_strided((blocks, heads, tokens, dim), (*outer, dim, 1), offset + tokens * dim)
    return k, v


def describe(facts: VllmFacts, *, windows: WindowLayers | None = None) -> VllmLayout:
    """Convert the facts.

    Args:
        facts: Of a worker, if its tensors are viewed; otherwise those of the scheduler suffice.
        windows: Part of sliding windows that moves. None means the last window if vLLM keeps no more, otherwise all.

    Raises:
        ConfigError: A feature in use changes KV, which then cannot be moved; the message names it and its value.
        LayoutError: A layer cannot be moved; the message names it, the reason and a remedy.
    """
    check(facts, has_store=False)
    layers = _ordered(facts)
    of_tokens = [layer for layer in layers if layer.state is None]
    if windows is None:
        windows = WindowLayers.LAST_WINDOW if _has_windows(facts) else WindowLayers.WHOLE
    element = _element(of_tokens, facts)
    layout = KVLayout(layers=tuple(_model_specs(layers, facts, windows)), dtype=_plain_dtype("--dtype", facts.model_dtype))
    shard = Shard(
        tp_size=facts.tp_size,
        tp_rank=facts.tp_rank,
        pp_size=facts.pp_size,
        pp_rank=facts.pp_rank,
        page_size=min(table.block_size for table in facts.tables.values() if table.spec != STATE_SPEC or not of_tokens),
        dtype=None if element is layout.dtype else element,
        order=TokenOrder.NHD if facts.cache_layout.endswith("NHC") else TokenOrder.HND,
        stage_layers=tuple(count * _caches_per_layer(layers) for count in facts.stage_layers) if facts.pp_size > 1 else None,
        dcp_size=facts.dcp_size,
        interleave_tokens=facts.interleave_tokens,
    )
    shard.check_dcp(layout)
    kv_scales = tuple(_scales(layers, facts)) if element is DType.FLOAT8_E4M3 else ()
    groups = tuple(_groups(layout, shard, layers, facts.tables))
    return VllmLayout(
        layout=layout,
        shard=shard,
        layers=layers,
        kv_scales=kv_scales,
        groups=tuple(group for group, _ in groups),
        block_groups=tuple(table for _, table in groups),
        page_sizes=tuple(facts.tables[table].block_size for _, table in groups),
        window_tables=tuple(_window_tables(facts.tables)),
        num_blocks=facts.num_blocks,
        shared_layers=frozenset(facts.shared_layers),
    )


def check(facts: VllmFacts, *, has_store: bool) -> None:
    """Check that KV depends only on the model and the tokens, and that all layers store K and V, a latent or a state.

    Args:
        has_store: KV goes to a store, which keeps pages of tokens and no states.

    Raises:
        ConfigError, LayoutError: As `describe`.
    """
    for name, value in facts.features.items():
        raise ConfigError(f"{name} is on ({value}); KV of such an instance cannot be moved yet")
    if facts.dcp_size > 1 and has_store:
        raise ConfigError(f"decode_context_parallel_size is {facts.dcp_size}; with a store, it must be 1")
    if not facts.layers:
        raise LayoutError("no layer of this rank keeps KV; kvferry moves that of attention layers and recurrent states")
    for layer in facts.layers:
        _check_layer(layer, facts)
        if layer.spec == CHUNKED_SPEC and has_store:
            raise LayoutError(
                f"layer {layer.name} attends in chunks and drops blocks, which was not tested with a store; start vLLM with "
                "--disable-hybrid-kv-cache-manager"
            )
        if layer.state is not None and has_store:
            raise LayoutError(f"layer {layer.name} keeps a recurrent state, which a store cannot keep; KvferryConnector moves it")
        if layer.state is not None and facts.pp_size > 1:
            raise LayoutError(
                f"layer {layer.name} keeps a recurrent state, which cannot be moved between engines of pipeline stages; use "
                "pipeline_parallel_size 1"
            )
    if facts.pp_size > 1 and len(facts.tables) > 1 and (has_store or not facts.model_layers):
        unknown = "and kvferry does not know the model's architecture, and so not the layers of other pipeline stages"
        raise LayoutError(
            f"the layers have {len(facts.tables)} block tables, {'not tested with stages and store' if has_store else unknown}; "
            "start vLLM with --disable-hybrid-kv-cache-manager, or use pipeline_parallel_size 1"
        )


def _ordered(facts: VllmFacts) -> tuple[LayerFacts, ...]:
    """Return the rank's caches in the order in which they are computed.

    The indexer of a layer precedes its attention, and a state follows it (Falcon-H1 has both). The layers of a draft model follow
    the model's own.

    A pipeline stage must have exactly its own layers.
    """
    by_place: dict[tuple[bool, int, int], LayerFacts] = {}
    for layer in facts.layers:
        of_layer = 2 if layer.state is not None else int(layer.row_format != INDEXER_ROWS)
        place = (layer.is_draft, layer_index(layer.name), of_layer)
        if place in by_place:
            raise LayoutError(f"{by_place[place].name} and {layer.name} are caches of one layer; kvferry moves one of each")
        by_place[place] = layer
    if facts.pp_size > 1:
        begin = sum(facts.stage_layers[: facts.pp_rank])
        wanted = range(begin, begin + facts.stage_layers[facts.pp_rank])
        indices = sorted({index for _, index, _ in by_place})
        if indices != list(wanted):
            raise LayoutError(
                f"stage {facts.pp_rank} keeps KV of layers {', '.join(map(str, indices))}; with pipeline stages every "
                f"layer must keep its own, here [{wanted.start}, {wanted.stop})"
            )
    return tuple(layer for _, layer in sorted(by_place.items()))


def _caches_per_layer(layers: Sequence[LayerFacts]) -> int:
    """Return 2 if layers have an indexer, otherwise 1."""
    return 2 if any(layer.row_format == INDEXER_ROWS for layer in layers) else 1


def layer_index(name: str) -> int:
    """Return the layer's index in the model from its module's name. Raises LayoutError if the name has not exactly one number."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise LayoutError(f"layer {name} has {len(numbers)} numbers in its name; must have one, which layer of the model it is")
    return numbers[0]


def _check_layer(layer: LayerFacts, facts: VllmFacts) -> None:
    if layer.spec not in _KNOWN_SPECS:
        raise LayoutError(
            f"layer {layer.name} {_WHY_NOT.get(layer.spec, 'has a KV cache that kvferry does not know')} ({layer.spec}); "
            f"it cannot be moved yet (KV cache group {layer.group}): serve the model without --kv-transfer-config"
        )
    if facts.dcp_size > 1 and not layer.is_dcp_sharded:
        raise LayoutError(
            f"layer {layer.name} keeps all tokens on each rank (KV cache group {layer.group}), beside others whose tokens are "
            f"divided: start vLLM with --decode-context-parallel-size 1, not {facts.dcp_size}"
        )
    if layer.spec == STATE_SPEC:
        check_state(f"{layer.name} (KV cache group {layer.group})", layer.state, tp_size=facts.tp_size)
        return
    if layer.is_packed_otherwise:
        raise LayoutError(
            f"layer {layer.name} has rows in a format that kvferry does not know ({layer.spec}, {layer.dtype}, KV cache group "
            f"{layer.group}); supported formats with scales in the rows: {', '.join(ROW_FORMATS)}"
        )
    is_scaled_float8 = layer.quant_mode == "FP8_PER_TENSOR" and facts.cache_dtype in _FLOAT8_SETTINGS and layer.num_scales == 1
    if layer.quant_mode != "NONE" and not is_scaled_float8 and not layer.row_format:
        raise LayoutError(
            f"layer {layer.name} is quantised as {layer.quant_mode} (--kv-cache-dtype {facts.cache_dtype}, scales: "
            f"{layer.num_scales}, KV cache group {layer.group}); supported quantised caches: fp8 (e4m3) with one scale per "
            f"layer, {', '.join(ROW_FORMATS)}"
        )


def _element(layers: Sequence[LayerFacts], facts: VllmFacts) -> DType:
    """Return the element type of layers that have one. If all have rows of another format, it is the model's."""
    found: dict[DType, str] = {}
    for layer in layers:
        if layer.row_format:
            continue
        is_plain = layer.quant_mode == "NONE"
        found.setdefault(_plain_dtype(layer.name, layer.dtype) if is_plain else DType.FLOAT8_E4M3, layer.name)
    if len(found) > 1:
        (one, first), (other, second) = list(found.items())[:2]
        raise LayoutError(f"layer {first} keeps {one}, {second} {other}; the layers of a rank must keep one element type")
    return next(iter(found), _plain_dtype("--dtype", facts.model_dtype))


def _plain_dtype(name: str, dtype: str) -> DType:
    if dtype not in _PLAIN_DTYPES:
        raise LayoutError(f"{name} has dtype {dtype}; must be one of {', '.join(_PLAIN_DTYPES)}")
    return DType(dtype)


def _model_specs(layers: Sequence[LayerFacts], facts: VllmFacts, windows: WindowLayers) -> Iterator[LayerSpec]:
    """Yield all layers of the model that keep KV, in order."""
    if facts.pp_size == 1:
        for layer in layers:
            yield from _specs(layer, facts, windows)
        return
    own = [_spec(layer, facts, windows) for layer in layers]
    indices = [layer_index(layer.name) for layer in layers]
    known = [_moved(spec, windows) for spec in facts.model_layers]
    by_layer: dict[int, list[LayerSpec]] = {}
    for index, spec in zip(indices, own, strict=True):
        by_layer.setdefault(index, []).append(spec)
    if known and len(by_layer) == len(own):
        differing = next((at for at, spec in zip(indices, own, strict=True) if known[at] != spec), None)
        if differing is not None:
            raise LayoutError(f"layer {differing} keeps {own[differing - indices[0]]}; config.json says {known[differing]}")
        yield from known
        return
    alike = by_layer[indices[0]]
    if any(specs != alike for specs in by_layer.values()):
        raise LayoutError(
            "the layers of this stage differ, and kvferry does not know the model's architecture; the layers of other stages "
            "cannot be determined: use pipeline_parallel_size 1"
        )
    yield from alike * sum(facts.stage_layers)


def _specs(layer: LayerFacts, facts: VllmFacts, windows: WindowLayers) -> Iterator[LayerSpec]:
    """Yield the layer, or each part of its state."""
    if layer.state is None:
        yield _spec(layer, facts, windows)
        return
    for part in parts_of(layer.state):
        try:
            yield part.spec(tp_size=facts.tp_size, num_groups=facts.num_state_groups)
        except LayoutError as error:
            raise LayoutError(f"layer {layer.name}: {error}") from None


def _spec(layer: LayerFacts, facts: VllmFacts, windows: WindowLayers) -> LayerSpec:
    is_latent = layer.spec in _LATENT_SPECS
    spec = LayerSpec(
        kind=LayerKind.MLA if is_latent and not layer.v_head_dim and not layer.window_tokens else LayerKind.ATTENTION,
        num_kv_heads=1 if is_latent else _total_heads(layer, facts),
        k_head_dim=layer.k_head_dim,
        v_head_dim=layer.v_head_dim,
        dtype=DType.INT8 if layer.row_format else None,
    )
    if is_latent and not layer.window_tokens:
        return spec
    if layer.window_tokens:  # vLLM frees blocks behind the window or chunk
        is_chunked = layer.spec == CHUNKED_SPEC
        if windows is WindowLayers.WHOLE:
            raise LayoutError(
                f"layer {layer.name} keeps only a {'chunk' if is_chunked else 'window'} of {layer.window_tokens} tokens, and "
                f"window_layers={windows} needs blocks for every token of the prompt: leave it out, or start vLLM with "
                "--disable-hybrid-kv-cache-manager (with --disable-sliding-window if all layers have a window)"
            )
        kind = LayerKind.CHUNKED_LOCAL if is_chunked else LayerKind.SLIDING_WINDOW
        return replace(spec, kind=kind, window_tokens=layer.window_tokens)
    if windows is WindowLayers.WHOLE or layer.is_draft or _has_windows(facts):
        return spec
    # The spec of a group merges those of its layers, and does not show which of them have a window.
    if not facts.model_layers:
        raise LayoutError(
            f"window_layers={WindowLayers.LAST_WINDOW}, but kvferry does not know the model's architecture, nor so which layers "
            f"have a window; use {WindowLayers.WHOLE}"
        )
    known = facts.model_layers[layer_index(layer.name)]
    if known.kind is LayerKind.SLIDING_WINDOW and facts.is_consumer and facts.has_prefix_caching:
        raise LayoutError(
            f"window_layers={WindowLayers.LAST_WINDOW} leaves blocks of sliding windows partly unwritten, and this decode "
            "instance keeps blocks for later prompts; start vLLM without --disable-hybrid-kv-cache-manager, or with "
            f"--no-enable-prefix-caching, or use {WindowLayers.WHOLE}"
        )
    return replace(spec, kind=known.kind, window_tokens=known.window_tokens)


def _moved(spec: LayerSpec, windows: WindowLayers) -> LayerSpec:
    """Return the spec of a layer of the model's configuration, as it is moved."""
    if spec.kind is LayerKind.SLIDING_WINDOW and windows is WindowLayers.WHOLE:
        return replace(spec, kind=LayerKind.ATTENTION, window_tokens=0)
    return spec


def _total_heads(layer: LayerFacts, facts: VllmFacts) -> int:
    """Return the layer's KV heads in the whole model. vLLM gives each rank one head if there are more ranks than heads."""
    if facts.tp_size == 1 or layer.num_kv_heads > 1:
        return layer.num_kv_heads * facts.tp_size
    index = layer_index(layer.name)
    if layer.is_draft:
        total = facts.draft_num_kv_heads
    else:
        total = facts.model_layers[index].num_kv_heads if index < len(facts.model_layers) else facts.total_num_kv_heads
    if max(1, total // facts.tp_size) != layer.num_kv_heads:
        raise LayoutError(
            f"layer {layer.name} has 1 KV head on each of {facts.tp_size} ranks, and the model has {total}: how many this layer "
            "has in all cannot be determined; use tensor_parallel_size 1"
        )
    if facts.tp_size % total:
        raise LayoutError(f"layer {layer.name} has {total} KV heads on {facts.tp_size} ranks; must divide them")
    return total


def _scales(layers: Sequence[LayerFacts], facts: VllmFacts) -> Iterator[tuple[float, float]]:
    """Yield the scales of each layer of the model. With pipeline stages they must be 1.0: a stage does not know the others'."""
    own = [(1.0, 1.0) if layer.row_format else (layer.k_scale, layer.v_scale) for layer in _by_layer(layers)]
    if facts.pp_size == 1:
        yield from own
        return
    for layer, scales in zip(layers, own, strict=True):
        if scales != (1.0, 1.0):
            raise LayoutError(f"layer {layer.name} has scales {scales}; with pipeline stages fp8 caches must have none")
    yield from ((1.0, 1.0),) * sum(facts.stage_layers)


def _groups(
    layout: KVLayout, shard: Shard, layers: Sequence[LayerFacts], tables: Mapping[int, TableFacts]
) -> Iterator[tuple[LayerGroup, int]]:
    """Yield the layers of each page table, which share an element type, with the index of its block table.

    All pipeline stages yield the same page tables, because the scheduler sends one set to all of them.
    """
    begin, facts = shard.layers(layout).begin, _by_layer(layers)
    for group in layer_groups(layout):
        by_table: dict[tuple[int, str], list[int]] = {}
        for layer in group.layers_of(layout, shard):
            by_table.setdefault((facts[layer - begin].group, layout.layers[layer].dtype or ""), []).append(layer)
        with_layers = {index for index, _ in by_table}
        for index, table in tables.items():
            if index not in with_layers and _is_table_of(group, table):
                by_table[index, ""] = []
        if not by_table:  # vLLM has one block table for all groups
            by_table[0, ""] = []
        for (index, _), of_table in sorted(by_table.items()):
            yield group if len(by_table) == 1 else replace(group, layers=tuple(of_table)), index


def _is_table_of(group: LayerGroup, table: TableFacts) -> bool:
    kind = GroupKind.WINDOW if table.window_tokens else GroupKind.FULL
    kind = {CHUNKED_SPEC: GroupKind.CHUNK, STATE_SPEC: GroupKind.STATE}.get(table.spec, kind)
    return (kind, table.window_tokens) == (group.kind, group.window_tokens)


def _has_windows(facts: VllmFacts) -> bool:
    return any(table.window_tokens for table in facts.tables.values())


def _by_layer(layers: Sequence[LayerFacts]) -> list[LayerFacts]:
    """Return the facts of each layer of the layout: those of a state once for each of its parts."""
    return [layer for layer in layers for _ in range(1 if layer.state is None else len(parts_of(layer.state)))]


def _window_tables(tables: Mapping[int, TableFacts]) -> Iterator[WindowTable]:
    """Yield the block tables of layers with a window or chunks, if vLLM frees blocks behind it."""
    for group, table in tables.items():
        if table.window_tokens:
            yield WindowTable(
                group=group,
                window_tokens=table.window_tokens,
                block_size=table.block_size,
                is_chunked=table.spec == CHUNKED_SPEC,
            )
