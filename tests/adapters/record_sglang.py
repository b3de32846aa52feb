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
    "qk_rope_head_dim",
)  # fmt: skip
DTYPES = ("dtype", "store_dtype")
TENSORS = ("k_buffer", "v_buffer", "kv_buffer")
MAPPINGS = ("layers_mapping", "full_attention_layer_id_mapping")


def pools() -> Iterator[tuple[str, object]]:
    """Small pools of each class, by a name for the test."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
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
    windows: dict[str, Any] = {
        "swa_attention_layer_ids": [0, 2],
        "full_attention_layer_ids": [1, 3],
        "head_num": 4,
        "head_dim": 32,
    }
    yield "swa", SWAKVPool(size=96, size_swa=48, page_size=16, dtype=torch.float32, device="cpu", **windows)
    states: dict[str, Any] = {"full_attention_layer_ids": [1, 3], "mamba_pool": None, "head_num": 4, "head_dim": 32}
    yield "hybrid", HybridLinearKVPool(size=96, page_size=16, dtype=torch.float32, device="cpu", **states)


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
            found[name] = [
                {"shape": list(tensor.shape), "stride": list(tensor.stride()), "dtype": str(tensor.dtype)} for tensor in tensors
            ]
    return found


def interface() -> dict[str, object]:
    """What the backend hooks into, and what SGLang calls of it."""
    from sglang.srt.disaggregation.base import conn
    from sglang.srt.disaggregation.utils import KVClassType

    from kvferry.engines.sglang_backend import GET_CLASS, SCHEDULER

    states = {name: value for name, value in vars(conn.KVPoll).items() if not name.startswith("_")}
    hooked = {target: str(inspect.signature(pkgutil.resolve_name(target))) for target in (GET_CLASS, *SCHEDULER)}
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
