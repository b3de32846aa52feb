"""Arrays of a step: slots of tokens, and copies to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device; on a GPU without waiting for queued work."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def token_slots(page_table: NDArray[np.int64], begin: int, end: int, page_size: int) -> NDArray[np.int64]:
    """Return the slots of the tokens [begin, end) of a request, int64 [end - begin]; other pages are not read."""
    if page_size == 1:
        return page_table[begin:end]
    first_page = begin // page_size
    pages = page_table[first_page : -(-end // page_size)]
    slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
    return slots[begin - first_page * page_size : end - first_page * page_size]
