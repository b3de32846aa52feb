"""The kinds of demo model, and the models that are kept between runs. Plain values, no torch.

Each kind is one way in which a layer keeps its state of earlier tokens.
A model with random weights does not show damage. Attention must decide the next token, and two correct ways to add up the same
numbers must agree about every token. Larger shares and sharper scores make generation more varied and damage more visible,
but also multiply rounding errors from layer to layer. The numbers here were found by measurement, and tests check the models
against them (docs/adr/0015-the-demo-model.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import transfer
from transfer.errors import EngineError

NUM_LAYERS: Final = 8
HIDDEN_SIZE: Final = 264  # transformers refuses a hidden size that is not a multiple of the query heads; the nearest to 256
NUM_QUERY_HEADS: Final = 24
NUM_KV_HEADS: Final = 12
HEAD_DIM: Final = 32
INTERMEDIATE_SIZE: Final = 576
VOCAB_SIZE: Final = 768
# All head counts, the intermediate size and the vocabulary are multiples of 12: TP 1, 2, 3, 4, 6 and 12 divide.
MAX_CONTEXT_TOKENS: Final = 4096
WINDOW_TOKENS: Final = 64  # most of the demo's prompts pass it, some of them ten times

EMBEDDING_SCALE: Final = 1.0
QUERY_KEY_SCALE: Final = 1.6  # standard deviation of a query or key element; scores have its square
ATTENTION_SHARE: Final = 1.0  # what a layer's attention adds to the residual stream, beside an embedding of EMBEDDING_SCALE
MLP_SHARE: Final = 1.0
LAYER_GROWTH: Final = 1.1  # of ATTENTION_SHARE per layer: later layers add to a longer residual, and would count less and less
LOGIT_SCALE: Final = 3.0


class ModelKind(StrEnum):
    """What the demo model's layers keep."""

    LLAMA = "llama"  # K and V of every token
    SLIDING = "sliding"  # three of four layers only those of the last tokens (Gemma-3)
    MLA = "mla"  # a latent of every token, the same on all ranks (DeepSeek-V3)
    HYBRID = "hybrid"  # three of four layers a recurrent state and no tokens (Qwen3-Next)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoKind:
    """Recipe of one kind.

    Args:
        family: Stem of its classes' names in transformers.
        config: Fields of the configuration beside the sizes that all kinds share.
        gains: Module -> standard deviation of its output for an input of 1; 1 where absent.
        norms: End of a module's name -> weight of its norm, where it is not `norm`.
        norm: Weight of every other norm. Families that count the weights of norms from 1 have 0.
        grown: Modules whose output grows by `LAYER_GROWTH` from layer to layer.
    """

    family: str
    config_class: str
    config: Mapping[str, Any] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    norm: float = 1.0
    grown: tuple[str, ...] = ("o_proj",)


_PERIOD: Final = 4  # layers; the last of them has full attention


def _layer_types(kind: str) -> list[str]:
    return ["full_attention" if layer % _PERIOD == _PERIOD - 1 else kind for layer in range(NUM_LAYERS)]


KINDS: Final[Mapping[ModelKind, DemoKind]] = {
    ModelKind.LLAMA: DemoKind(
        family="Llama",
        config_class="LlamaConfig",
        gains={
            "q_proj": QUERY_KEY_SCALE,
            "k_proj": QUERY_KEY_SCALE,
            "o_proj": ATTENTION_SHARE,
            "down_proj": MLP_SHARE,
        },
    ),
    ModelKind.SLIDING: DemoKind(
        family="Gemma3",
        config_class="Gemma3TextConfig",
        config={
            "layer_types": _layer_types("sliding_attention"),
            "sliding_window": WINDOW_TOKENS,
            "query_pre_attn_scalar": HEAD_DIM,
        },
        # Queries, keys, and what attention and MLP add are all normalised: their norms say how much there is of them.
        norms={
            "q_norm": QUERY_KEY_SCALE - 1,
            "k_norm": QUERY_KEY_SCALE - 1,
            "post_attention_layernorm": ATTENTION_SHARE - 1,
            "post_feedforward_layernorm": MLP_SHARE - 1,
        },
        norm=0.0,
        grown=("post_attention_layernorm",),
    ),
    ModelKind.MLA: DemoKind(
        family="DeepseekV3",
        config_class="DeepseekV3Config",
        config={
            "num_key_value_heads": NUM_QUERY_HEADS,
            "head_dim": 16,
            "q_lora_rank": 132,
            "kv_lora_rank": 96,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": HEAD_DIM,
            "first_k_dense_replace": NUM_LAYERS,
            "moe_intermediate_size": INTERMEDIATE_SIZE,  # of no layer, but a TP degree must divide it all the same
        },
        gains={
            "q_b_proj": 1.5 * QUERY_KEY_SCALE,  # the latent is normalised: keys have a standard deviation of 1
            "kv_a_proj_with_mqa": QUERY_KEY_SCALE,
            "o_proj": ATTENTION_SHARE,
            "down_proj": MLP_SHARE,
        },
    ),
    ModelKind.HYBRID: DemoKind(
        family="Qwen3Next",
        config_class="Qwen3NextConfig",
        config={
            "layer_types": _layer_types("linear_attention"),
            "linear_num_key_heads": NUM_KV_HEADS,
            "linear_num_value_heads": NUM_QUERY_HEADS,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "mlp_only_layers": list(range(NUM_LAYERS)),
            "moe_intermediate_size": INTERMEDIATE_SIZE,
            "shared_expert_intermediate_size": INTERMEDIATE_SIZE,
        },
        gains={"o_proj": 2 * ATTENTION_SHARE, "out_proj": 1.5 * ATTENTION_SHARE, "down_proj": MLP_SHARE},  # behind gates
        norms={"q_norm": QUERY_KEY_SCALE - 1, "k_norm": QUERY_KEY_SCALE - 1, "linear_attn.norm": 1.0},
        norm=0.0,
        grown=("o_proj", "out_proj"),
    ),
}


async def cached_demo_model(
    kind: ModelKind = ModelKind.LLAMA, *, run: Callable[[list[str]], Awaitable[None]] | None = None
) -> Path:
    """Return the directory of the demo model of a kind. The first call makes it, in a few seconds.

    It is in the user's cache folder (``$XDG_CACHE_HOME/kvferry``, by default ``~/.cache/kvferry``), or in the system's temporary
    folder if that is not writable. Its name contains a hash of the code that makes it, so that another version makes another
    model.

    Args:
        run: Runs the command line that makes the model; by default in a process.

    Raises:
        EngineError: The model could not be made.
    """
    directory = _cache_folder() / f"demo-model-{kind}-{_key()}"
    if directory.exists():
        return directory
    # The move at the end makes sure that a directory with the final name is complete.
    with tempfile.TemporaryDirectory(prefix="new-", dir=directory.parent) as folder:
        fresh = Path(folder) / directory.name
        await (run or _run)([sys.executable, "-m", "kvferry", "model", "make", "--kind", kind, str(fresh)])
        try:
            fresh.rename(directory)
        except OSError:
            if not directory.exists():  # otherwise another run was faster
                raise
    return directory


def _key() -> str:
    """Return a key of the code that makes a model, and of kvferry's version."""
    source = hashlib.sha256()
    for name in ("model.py", "kinds.py"):
        source.update(Path(__file__).with_name(name).read_bytes())
    return f"{transfer.__version__}-{source.hexdigest()[:12]}"


def _cache_folder() -> Path:
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK | os.X_OK):
            return cache.resolve()
    folder = Path(tempfile.gettempdir()) / f"kvferry-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EngineError(f"{folder} belongs to another user; set XDG_CACHE_HOME to a folder that you can write to")
    return folder


async def _run(command: list[str]) -> None:
    from kvferry.local_cluster.spec import child_environment

    process = await asyncio.create_subprocess_exec(
        *command, env=child_environment(), stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = output.decode(errors="replace").strip().splitlines()
        raise EngineError(f"the demo model could not be made: {lines[-1] if lines else f'exit code {process.returncode}'}")
