"""What `kvferry plan` is given on its command line: `--compare` has every flag in one text, the sizes have units."""

from __future__ import annotations

import random
from dataclasses import fields

from fuzz.target import Target, require
from fuzz.trees import BORDERS, BYTE_SHARE, TEXTS, changed_bytes
from kvferry.plan.device import given_device
from kvferry.plan.options import PlanOptions, make_plan_for
from planner.model_directory import ModelDirectory
from planner.model_parts import LayerShape, ModelShape, Part, Weights
from transfer.errors import ConfigError, LayoutError, MemoryPlanError
from transfer.layout import DType, LayerSpec

_SHAPE = ModelShape(
    architecture="LlamaForCausalLM",
    dtype=DType.BFLOAT16,
    hidden_size=64,
    num_query_heads=4,
    max_context_tokens=4096,
    layers=(
        LayerShape(kv=LayerSpec(num_kv_heads=2, k_head_dim=16, v_head_dim=16), weights=(Weights(part=Part.MLP, unit_params=64),)),
    )
    * 4,
    first_stage=(),
    last_stage=(),
)
_NAMES = tuple(field.name for field in fields(PlanOptions))
_DEVICE = given_device(80 << 30, None)
assert _DEVICE is not None


def check(data: bytes) -> None:
    options = PlanOptions().changed(data.decode("utf-8", "replace"))
    if options.pp > 64 or (options.max_seq_len or 0) > 1 << 24:
        return  # a plan for each stage: the more are asked for, the longer it takes, as it should
    assert _DEVICE is not None
    plan = make_plan_for(options, ModelDirectory(shape=_SHAPE, checkpoint_bytes=None), _DEVICE)
    total = sum(line.num_bytes for line in plan.lines if not line.inside)
    require(total == plan.device_bytes, f"the lines of a plan add up to {total}, the device has {plan.device_bytes}")
    require(plan.max_total_tokens >= 0, "a pool of fewer tokens than none")


def mutate(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < BYTE_SHARE:
        return changed_bytes(data, rng)
    parts = data.decode("utf-8", "replace").split(",")
    choice = rng.randrange(4)
    if choice == 0 and parts:
        del parts[rng.randrange(len(parts))]
    else:
        units = ("", "B", "MiB", "GiB", "GB", " GiB", "kib")
        value = rng.choice(
            (str(rng.choice(BORDERS)) + rng.choice(units), rng.choice(TEXTS), "true", "false", "none", "0.5", "decode", "prefill")
        )
        parts.append(f"{rng.choice(_NAMES)}={value}")
    return ",".join(parts).encode()


TARGET = Target(
    name="plan_flags",
    about="flags of kvferry plan",
    modules=("kvferry.plan.options", "planner"),
    check=check,
    refuses=(ConfigError, LayoutError, MemoryPlanError),
    mutate=mutate,
    seeds=lambda: [
        b"tp=2,page_size=64,max_running_requests=16",
        b"role=prefill,staging=64MiB,chunked_prefill_size=512,sparse-policy=xattention",
        b"ring=256MiB,cuda_graph_bs=1 2 4,kv_dtype=float8_e4m3fn,policy=page-count,memory_ratio=0.5",
        b"pp=2,static_fraction=0.9,weights=1GiB,speculative=EAGLE,max_seq_len=1024,max_total_tokens=100000",
    ],
    max_bytes=1024,
    max_line_chars=6000,
    is_one_line=False,
)
