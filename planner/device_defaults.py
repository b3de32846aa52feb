"""Compute default settings from the memory of a rank's GPU and the KV of its model."""

from __future__ import annotations

import ctypes
from typing import Final, TypeVar

from planner.plan_inputs import default_batches
from transfer.chunk import ChunkPlan, largest_wire_bytes
from transfer.config import ChunkConfig, DecodeNodeConfig, NodeConfig, PrefillNodeConfig, StagingConfig
from transfer.layer_groups import DECODE_STEPS_IN_FLIGHT, PREFILL_STEPS_IN_FLIGHT, GroupKind, layer_groups
from transfer.layout import KVLayout, Shard, routes

CHUNK_BYTES: Final = 256 << 20
"""KV of a chunk on a rank. Each piece costs both ends about 400 us (docs/adr/0019), in which an NVLink carries 60 MB, so smaller
chunks cost time. Larger ones leave more of a prompt to send after its last step."""

MIN_CHUNK_TOKENS: Final = 512
UNKNOWN_CHUNK_TOKENS: Final = 2048  # `CHUNK_BYTES` for the KV of Llama 3 8B

PREFILL_REQUESTS: Final = 64
"""Maximum number of prompts that a prefill node computes or sends at once. A step has a few, and the others are being sent."""

REQUESTS_PART: Final = 8
LEAST_REQUESTS: Final = 32
"""Windows and states of all running requests take at most an eighth of the GPU. This limit always allows 32 requests."""

MAX_LAYER_BYTES: Final = 32 << 20
"""Maximum KV of a layer of a chunk if the engine reports layers of a running step. A piece is a group of layers."""

_LONG_PROMPT: Final = 1 << 30  # tokens; longer than any window

AnyNode = TypeVar("AnyNode", bound=NodeConfig)


def gpu_chunk_tokens(
    layout: KVLayout, shard: Shard, *, step_tokens: int, layer_bytes: int | None = None, by_layer: bool = False
) -> int:
    """Return the tokens of a chunk, for an engine on GPUs whose steps have up to `step_tokens` prompt tokens.

    The result is the smallest power of two whose KV has at least `CHUNK_BYTES` on the fullest rank. It is at least
    `MIN_CHUNK_TOKENS` and at most `step_tokens`, and the same for all ranks.

    With `by_layer`, it is the largest power of two for which one layer of KV has at most `MAX_LAYER_BYTES`, within these limits.
    Then the first layers of a prompt that fits one step are sent while the last ones are computed.

    Args:
        by_layer: The engine reports the layers of a running step.
        layer_bytes: Maximum bytes of one layer of a chunk, the smallest piece. None means no bound.
    """
    every, dtype = routes(layout, shard, shard), shard.pool_dtype(layout)
    tokens = MIN_CHUNK_TOKENS
    if by_layer:
        while tokens < step_tokens and _layer_bytes(2 * tokens, layout, shard) <= MAX_LAYER_BYTES:
            tokens *= 2
    else:
        while tokens < step_tokens and largest_wire_bytes(ChunkPlan(chunk_tokens=tokens), layout, every, dtype) < CHUNK_BYTES:
            tokens *= 2
    tokens = min(tokens, step_tokens)
    while layer_bytes is not None and tokens > 1 and _layer_bytes(tokens, layout, shard) > layer_bytes:
        tokens //= 2
    return tokens


def _layer_bytes(tokens: int, layout: KVLayout, shard: Shard) -> int:
    """Return the bytes of the largest piece of one layer, on the fullest rank."""
    plan = ChunkPlan(chunk_tokens=tokens, layers_per_group=1)
    return largest_wire_bytes(plan, layout, routes(layout, shard, shard), shard.pool_dtype(layout))


def with_gpu_chunks(
    chunk: ChunkConfig,
    staging: StagingConfig,
    layout: KVLayout | None,
    shard: Shard,
    *,
    step_tokens: int,
    by_layer: bool = False,
) -> ChunkConfig:
    """Return `chunk` with the GPU default of `chunk_tokens`, unless that is set; see `gpu_chunk_tokens`."""
    if "chunk_tokens" in chunk.model_fields_set:
        return chunk
    if layout is None:
        tokens = min(UNKNOWN_CHUNK_TOKENS, step_tokens)
    else:
        bounds = [size for size in (staging.slot_bytes, chunk.piece_bytes) if size is not None]
        tokens = gpu_chunk_tokens(
            layout,
            shard,
            step_tokens=step_tokens,
            layer_bytes=min(bounds, default=None),
            by_layer=by_layer and chunk.layers_per_group is None,
        )
    return chunk.model_copy(update={"chunk_tokens": tokens})


def with_gpu_defaults(config: AnyNode, layout: KVLayout | None, *, device_bytes: int) -> AnyNode:
    """Return a daemon's settings with the defaults for a GPU of `device_bytes`, where nothing is set.

    Args:
        layout: KV of the model; None if only the engine knows it.
    """
    pool = config.pool
    shard = Shard(tp_size=config.parallel.tp_size, page_size=pool.page_size, order=pool.order, dtype=pool.dtype)
    step_tokens, batch = default_batches(device_bytes, shard.tp_size)
    if not isinstance(config, PrefillNodeConfig):
        running = gpu_running_requests(layout, shard, device_bytes=device_bytes)
        decode = _with_limits(config, max_running_requests=running)
        if isinstance(decode, DecodeNodeConfig) and decode.cuda_graph_max_bs is None and decode.cuda_graph_bs is None:
            decode = decode.model_copy(update={"cuda_graph_max_bs": min(batch, decode.limits.max_running_requests)})
        return decode
    changed = _with_limits(config, max_step_tokens=step_tokens)
    most = changed.limits.max_step_tokens
    if config.most_pages is not None:
        most = min(most, config.most_pages * pool.page_size)
    chunk = with_gpu_chunks(changed.chunk, changed.staging, layout, shard, step_tokens=most)
    running = gpu_running_requests(layout, shard, device_bytes=device_bytes, chunk_tokens=chunk.chunk_tokens)
    return _with_limits(changed, max_running_requests=running).model_copy(update={"chunk": chunk})


def _with_limits(config: AnyNode, **values: int) -> AnyNode:
    """Return the settings with those limits, where they are not set."""
    unset = {name: value for name, value in values.items() if name not in config.limits.model_fields_set}
    return config.model_copy(update={"limits": config.limits.model_copy(update=unset)})


def gpu_running_requests(layout: KVLayout | None, shard: Shard, *, device_bytes: int, chunk_tokens: int | None = None) -> int:
    """Return the requests that a node on GPUs of `device_bytes` runs at once, by the room for their sliding windows and states.

    Args:
        chunk_tokens: Tokens of a chunk of a prefill node; None for a decode node.
    """
    if chunk_tokens is None:
        # Batches above the largest CUDA graph of the table are possible, too.
        batch, tokens_in_flight = max(default_batches(device_bytes, shard.tp_size)[1], LEAST_REQUESTS), DECODE_STEPS_IN_FLIGHT
    else:
        batch, tokens_in_flight = PREFILL_REQUESTS, PREFILL_STEPS_IN_FLIGHT * chunk_tokens
    if layout is None:
        return batch
    of_one = sum(
        group.page_bytes(layout, shard)
        * group.peak_pages(_LONG_PROMPT, page_size=shard.page_size, tokens_in_flight=tokens_in_flight)
        for group in layer_groups(layout)
        if group.kind is not GroupKind.FULL
    )
    return min(batch, max(LEAST_REQUESTS, device_bytes // REQUESTS_PART // of_one)) if of_one else batch


def visible_gpu_bytes(index: int) -> int:
    """Return the bytes of memory of the GPU with this index among the visible ones; 0 if there is no such GPU or no driver.

    It asks the driver without opening a context, which would take memory of the GPU.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    device, size = ctypes.c_int(), ctypes.c_size_t()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return 0
    return size.value if not driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) else 0
