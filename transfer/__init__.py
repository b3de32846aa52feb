"""kvferry's library: geometry, ring, protocol and transports for moving KV between differently cut tiers.

The names below are the pure core; importing them loads neither torch nor any network library.
"""

from transfer.chunk import Chunk, ChunkPlan, split_into_chunks
from transfer.layout import DType, HeadSlice, KVLayout, LayerKind, LayerSpec, Range, Route, Shard, TokenOrder, routes
from transfer.ring import Grant, RingView, StagingAllocator, Watermark

__version__ = "0.2.0.dev0"

__all__ = [
    "Chunk",
    "ChunkPlan",
    "DType",
    "Grant",
    "HeadSlice",
    "KVLayout",
    "LayerKind",
    "LayerSpec",
    "Range",
    "RingView",
    "Route",
    "Shard",
    "StagingAllocator",
    "TokenOrder",
    "Watermark",
    "routes",
    "split_into_chunks",
]
