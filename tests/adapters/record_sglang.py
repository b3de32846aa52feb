"""Writes down how SGLang's own pool classes lie in memory, for tests that run without SGLang.

Run it where SGLang is installed (tests/sglang/README.md), from the repository's root::

    python tests/adapters/record_sglang.py

It writes tests/adapters/recorded/sglang-VERSION-pools.json (a pool's class, the attributes that `kvferry.engines.sglang_layout`
reads, shape, stride and dtype of each tensor) and ...-interface.json (what the backend is called by and hooks into).
"""

from __future__ import annotations

import inspect
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PLAIN = (
    "page_size", "size", "start_layer", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_layout", "kv_lora_rank",
    "qk_rope_head_dim", "is_quantized_kv_cache", "mamba_layer_ids", "conv_shard_groups", "conv_slice_axis",
    "dsa_kv_cache_store_fp8", "kv_cache_dim", "index_head_dim", "index_kpool",
)  # fmt: skip
DTYPES = ("dtype", "store_dtype")
TENSORS = ("k_buffer", "v_buffer", "kv_buffer", "index_k_with_scale_buffer")
MAPPINGS = ("layers_mapping", "full_attention_layer_id_mapping")
PARTS = ("full_kv_pool", "swa_kv_pool", "mamba_pool")


def pools() -> Iterator[tuple[str, object]]:
    """Small pools of each class, by a name for the test."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    rest: dict[str, Any] = {"device": "cpu", "enable_memory_saver": False}
    heads: dict[str, Any] = {"head_dim": 32, "layer_num": 4, **rest}
    yield "mha", MHATokenToKVPool(size=4096, page_size=16, dtype=torch.float32, head_num=4, **heads)
    yield "mha_tp2", MHATokenToKVPool(size=4096, page_size=16, dtype=torch.float32, head_num=2, **heads)
    yield "mha_page1", MHATokenToKVPool(size=4096, page_size=1, dtype=torch.float32, head_num=4, **heads)
    yield "mha_uneven", MHATokenToKVPool(size=100, page_size=16, dtype=torch.bfloat16, head_num=4, **heads)
    yield "mha_v64", MHATokenToKVPool(size=96, page_size=16, dtype=torch.float16, head_num=4, v_head_dim=64, **heads)
    yield "mha_float8", MHATokenToKVPool(size=96, page_size=16, dtype=torch.float8_e4m3fn, head_num=4, **heads)
    yield (
        "mha_stage",
        MHATokenToKVPool(size=96, page_size=16, dtype=torch.float32, head_num=4, start_layer=4, end_layer=7, **heads),
    )
    latent: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "layer_num": 4, **rest}
    yield "mla", MLATokenToKVPool(size=96, page_size=16, dtype=torch.bfloat16, **latent)
    yield "mla_float8", MLATokenToKVPool(size=96, page_size=16, dtype=torch.float8_e4m3fn, **latent)
    sparse: dict[str, Any] = {
        "index_head_dim": 128,
        "index_buf_size": 192,
        "skip_topk_layers": [False, True, False, True],
        **latent,
    }
    yield "dsa", DSATokenToKVPool(size=192, page_size=64, dtype=torch.bfloat16, kv_cache_dim=576, **sparse)
    yield "dsa_packed", DSATokenToKVPool(size=192, page_size=64, dtype=torch.float8_e4m3fn, kv_cache_dim=656, **sparse)
    yield "mha_float8_e5m2", MHATokenToKVPool(size=96, page_size=16, dtype=torch.float8_e5m2, head_num=4, **heads)
    yield "draft", MHATokenToKVPool(size=4096, page_size=16, dtype=torch.float32, head_num=2, **heads | {"layer_num": 1})
    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        yield "mha_hnd", MHATokenToKVPool(size=96, page_size=16, dtype=torch.float32, head_num=4, **heads)
    windows: dict[str, Any] = {
        "swa_attention_layer_ids": [0, 2],
        "full_attention_layer_ids": [1, 3],
        "head_num": 4,
        "head_dim": 32,
    }
    yield "swa", SWAKVPool(size=96, size_swa=48, page_size=16, dtype=torch.float32, device="cpu", **windows)
    for tp_size in (1, 2):
        name = "hybrid" if tp_size == 1 else f"hybrid_tp{tp_size}"
        yield f"{name}_gdn", hybrid(states(tp_size, [32, 32, 64]), head_num=4 // tp_size)
    yield "hybrid_mamba2", hybrid(states(1, None), head_num=4)
    yield "hybrid_kda", hybrid(kda_states(), head_num=4)


def states(tp_size: int, conv_shard_groups: list[int] | None) -> object:
    """A pool of states: convolutions of 128 channels and 3 inputs, and recurrences of 8 heads."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import MambaPool

    shape = Mamba2StateShape.create(
        tp_world_size=tp_size,
        intermediate_size=64,
        n_groups=4,
        num_heads=8,
        head_dim=8,
        state_size=8,
        conv_kernel=4,
        conv_shard_groups=conv_shard_groups,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    layers = [0, 2]
    params = Mamba2CacheParams(shape=shape, layers=layers, dtype=dtype)
    return MambaPool(size=6, spec_state_size=0, cache_params=params, mamba_layer_ids=layers, device="cpu")


def kda_states() -> object:
    """A pool of states of Kimi's delta attention."""
    from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape, Mamba2StateDType
    from sglang.srt.mem_cache.memory_pool import MambaPool

    shape = KimiLinearStateShape.create(tp_world_size=2, num_heads=8, head_dim=8)
    params = KimiLinearCacheParams(
        shape=shape, layers=[0, 2], dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    )
    return MambaPool(size=6, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu")


def hybrid(mamba_pool: object, *, head_num: int) -> object:
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return HybridLinearKVPool(
        size=96,
        page_size=16,
        dtype=torch.float32,
        device="cpu",
        full_attention_layer_ids=[1, 3],
        mamba_pool=mamba_pool,
        head_num=head_num,
        head_dim=32,
    )


def described(pool: object) -> dict[str, object]:
    found: dict[str, object] = {"class": type(pool).__name__}
    found |= {name: getattr(pool, name) for name in PLAIN if hasattr(pool, name)}
    found |= {name: str(getattr(pool, name)) for name in DTYPES if hasattr(pool, name)}
    for name in MAPPINGS:
        mapping = getattr(pool, name, None)
        if isinstance(mapping, Mapping):
            found[name] = [[layer, place] for layer, place in mapping.items()]
    for name in TENSORS:
        tensors = getattr(pool, name, None)
        if tensors is not None:
            found[name] = [tensor_of(tensor) for tensor in tensors]
    for name in PARTS:
        if getattr(pool, name, None) is not None:
            found[name] = described(getattr(pool, name))
    cache = getattr(pool, "mamba_cache", None)
    if cache is not None:
        found["mamba_cache"] = {"conv": [tensor_of(state) for state in cache.conv], "temporal": tensor_of(cache.temporal)}
        found["num_state_entries"] = len(pool.get_contiguous_buf_infos()[0])  # type: ignore[attr-defined]
    return found


def tensor_of(tensor: torch.Tensor) -> dict[str, object]:
    return {"shape": list(tensor.shape), "stride": list(tensor.stride()), "dtype": str(tensor.dtype)}


def interface() -> dict[str, object]:
    """What the backend hooks into, and what SGLang calls of it."""
    from sglang.srt.disaggregation.base import conn
    from sglang.srt.disaggregation.utils import KVClassType

    from kvferry.engines.sglang_backend import GET_CLASS, HND_ADDRESSES, SCHEDULER

    states = {name: value for name, value in vars(conn.KVPoll).items() if not name.startswith("_")}
    hooked = {target: str(inspect.signature(pkgutil.resolve_name(target))) for target in (GET_CLASS, HND_ADDRESSES, *SCHEDULER)}
    bases = (conn.BaseKVManager, conn.BaseKVSender, conn.BaseKVReceiver, conn.BaseKVBootstrapServer)
    methods = {base.__name__: {name: str(inspect.signature(one)) for name, one in functions_of(base)} for base in bases}
    return {"states": states, "kinds": [kind.value for kind in KVClassType], "hooked": hooked, "methods": methods}


def functions_of(base: type) -> Iterator[tuple[str, Callable[..., object]]]:
    for name, value in vars(base).items():
        if inspect.isfunction(value):
            yield name, value


def main() -> None:
    folder = Path(__file__).parent / "recorded"
    folder.mkdir(exist_ok=True)
    recorded = {"pools": {name: described(pool) for name, pool in pools()}, "interface": interface()}
    for name, what in recorded.items():
        target = folder / f"sglang-{version('sglang')}-{name}.json"
        target.write_text(json.dumps(what, indent=1) + "\n", encoding="utf-8")
        print(f"{target}: {', '.join(what)}")


if __name__ == "__main__":
    main()
