"""How many host pages a rank has, and the settings that are refused, with their numbers."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decode_node.offload.open_rank import open_offload_rank
from decode_node.offload.sizes import check_store_sizes, host_page_counts, stored_block_pages
from tests.runtime.instances import decode_config
from transfer.config import StorageConfig
from transfer.config.storage import OffloadConfig
from transfer.errors import ConfigError, MemoryPlanError
from transfer.layer_groups import layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard
from transfer.pool.kv_pool import KVPool

FULL = LayerSpec(num_kv_heads=2, k_head_dim=4, v_head_dim=4)
WINDOW = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=2, k_head_dim=4, v_head_dim=4, window_tokens=32)
STATE = LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=2, k_head_dim=4, v_head_dim=0)
PAGE_SIZE, PAGE_BYTES = 16, 1000


def counts(*specs: LayerSpec, available_bytes: int = 10**9, device_pages: int = 100, **settings: Any) -> tuple[int, ...]:
    groups = layer_groups(KVLayout(layers=specs or (FULL,), dtype=DType.FLOAT16))
    return host_page_counts(
        OffloadConfig(**settings),
        groups,
        page_size=PAGE_SIZE,
        device_pages=[device_pages] * len(groups),
        page_bytes=[PAGE_BYTES] * len(groups),
        available_bytes=available_bytes,
    )


def test_a_ratio_is_of_each_group_that_is_kept() -> None:
    assert counts(host_ratio=2.5) == (250,)
    assert counts(FULL, WINDOW, host_ratio=0.25) == (25, 25)
    assert counts(FULL, STATE, host_ratio=2) == (200, 0), "states are kept nowhere else"


def test_memory_is_shared_in_the_ratio_of_the_device_pools() -> None:
    assert counts(FULL, WINDOW, host_memory=50 * PAGE_BYTES) == (25, 25)
    assert counts(FULL, STATE, host_memory=50 * PAGE_BYTES) == (50, 0)


def test_less_than_a_stride_is_refused() -> None:
    said = (
        r"offload.host_ratio is 0.03, which gives 3 host pages; one stride of offload.stride_tokens \(64\) takes 4 pages of 16 "
        r"tokens, 4,000 bytes of each rank"
    )
    with pytest.raises(ConfigError, match=said):
        counts(host_ratio=0.03, stride_tokens=64)
    with pytest.raises(ConfigError, match=r"offload.host_memory is 999, which gives 0 host pages"):
        counts(host_memory=999, stride_tokens=1)


def test_more_than_the_host_has_is_refused() -> None:
    said = "offload.host_ratio is 1.0, which takes 200,000 bytes of host memory for each rank; 199,999 are available to each"
    with pytest.raises(MemoryPlanError, match=said):
        counts(FULL, WINDOW, host_ratio=1, available_bytes=200 * PAGE_BYTES - 1)


def test_less_than_a_window_is_refused() -> None:
    """With it no prefix would ever be found."""
    assert counts(FULL, WINDOW, host_ratio=0.02, stride_tokens=16) == (2, 2)
    said = (
        "offload.host_ratio is 0.01, which gives 1 host pages to window_32, of 100 on the device; its window takes 2 pages of 16 "
        "tokens: set at least 0.02 times the device pool"
    )
    with pytest.raises(ConfigError, match=said):
        counts(FULL, WINDOW, host_ratio=0.01, stride_tokens=16)
    assert counts(FULL, WINDOW, host_ratio=1, device_pages=1, stride_tokens=16) == (1, 1), "no prompt has more"


def stored(**settings: Any) -> None:
    config = StorageConfig(directory=Path("store"), **settings)
    check_store_sizes(config, page_bytes=[500, PAGE_BYTES], header_bytes=100, jobs_at_once=2)


def test_bounds_of_the_store_that_hold_no_page_are_refused() -> None:
    stored(queue_bytes=2 * PAGE_BYTES, max_bytes=PAGE_BYTES + 100)
    said = "storage.queue_bytes is 1,999; it must hold the 2 pages of 1,000 bytes .* set at least 2,000"
    with pytest.raises(ConfigError, match=said):
        stored(queue_bytes=2 * PAGE_BYTES - 1)
    with pytest.raises(ConfigError, match=r"storage.max_bytes is 1,099; it must hold a page, which takes 1,100 bytes of it"):
        stored(max_bytes=PAGE_BYTES + 99)


def test_a_model_that_keeps_no_token_for_good_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no layers that keep every token \(window_32, state\); it must be left out"):
        counts(WINDOW, STATE, host_ratio=1)


async def test_an_engine_that_cannot_read_host_pages_is_refused(tmp_path: Path) -> None:
    """A refusal of a rank at its start ends the node: tests/cluster/nodes/test_bad_start.py."""
    config = decode_config(tmp_path, engine="blind:load", offload={"host_ratio": 2, "device_window": 64})
    layout = KVLayout(layers=(FULL,), dtype=DType.FLOAT16)
    engine = SimpleNamespace(pool=KVPool(layout=layout, shard=Shard(page_size=PAGE_SIZE), num_pages=(64,)))
    nothing: Any = None
    complaint = "offload.device_window is 64, and the engine blind:load cannot read KV in host memory"
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        await open_offload_rank(config, nothing, engine, allocator=nothing, engine_thread=nothing, send=nothing, on_free=nothing)


@pytest.mark.parametrize(
    ("offload", "says"),
    [
        ({"device_window": 64}, ("device_window is 64", "host_ratio")),
        ({"host_ratio": 2, "host_memory": 1 << 30}, ("host_ratio is 2", "host_memory is 1073741824")),
        ({}, ("storage.directory is", "offload.host_ratio", "offload.host_memory")),
    ],
    ids=["a window without host memory", "host memory said twice", "a store without host memory"],
)
def test_settings_that_need_each_other_or_exclude_each_other(
    tmp_path: Path, offload: dict[str, Any], says: tuple[str, ...]
) -> None:
    storage = {} if offload else {"directory": tmp_path / "store"}
    with pytest.raises((ConfigError, ValueError)) as refusal:
        decode_config(tmp_path, offload=offload, storage=storage)
    assert all(part in str(refusal.value) for part in says)


def test_a_block_in_the_store_fits_an_object_a_buffer_and_a_part_of_host_memory() -> None:
    def pages(**changes: int) -> int:
        return stored_block_pages(**{"slice_bytes": 1 << 16, "buffer_bytes": 64 << 20, "host_pages": 100_000} | changes)

    assert pages() == 64, "4 MiB"
    assert pages(buffer_bytes=1 << 20) == 16
    assert pages(host_pages=80) == 5
    assert pages(slice_bytes=8 << 20) == 1
