"""What the demo computes in.

Two correct runs of one model add up the same numbers in different orders: with and without a cache, over one rank or four. In
float32 that moves a logit by far less than the distance to the next one; in bfloat16 logits tie, and the runs then differ in a
token although nothing was damaged. So tokens are compared in float32, whatever the weights are stored in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvferry.demo.prompts import read_config

EXACT_DTYPE: Final = "float32"
_COMPUTABLE: Final = ("float32", "bfloat16", "float16")


def chosen_dtype(option: str, model: Path) -> str | None:
    """What the nodes and the single process are all told to compute in; None: nothing, the directory decides.

    Args:
        option: "float32" or "model".
        model: Hugging Face directory.
    """
    return EXACT_DTYPE if option == EXACT_DTYPE else model_dtype(model)


def model_dtype(model: Path) -> str | None:
    """The model's own dtype, as its configuration says it; None where it names none that can be computed in."""
    config = read_config(model)
    found = config.get("dtype", config.get("torch_dtype"))
    return found if found in _COMPUTABLE else None
