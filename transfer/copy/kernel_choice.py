"""Choose the implementation of a rank's copies: compiled code or NumPy, Triton, or plain torch where Triton cannot compile.

Triton needs more than a GPU: a C compiler for its launchers, ptxas, a writable cache, and support for the chip. Only a
compilation shows whether all of these exist. So a rank compiles and runs a small kernel when it starts.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Literal

import structlog
import torch

from transfer.copy.compiled_copy import IS_BUILT
from transfer.copy.digest import DIGEST_WORDS, digest
from transfer.errors import ConfigError

log = structlog.get_logger(__name__)

PROBE_BYTES = 64


class Kernels(StrEnum):
    """Implementations of gather, scatter, digest and moves of pages. All agree bit for bit."""

    COMPILED = "compiled"  # for pools in host memory, see `transfer.copy.compiled_copy`
    NUMPY = "numpy"  # for pools in host memory, without the compiled code
    TRITON = "triton"  # for pools on a GPU
    TORCH = "torch"  # on every device, see `transfer.copy.torch_copy`

    @classmethod
    def fastest(cls, device: torch.device) -> Kernels:
        """Return the fastest implementation for pools on `device`."""
        if device.type != "cpu":
            return cls.TRITON
        return cls.COMPILED if IS_BUILT else cls.NUMPY


@cache
def choose_kernels(setting: Literal["auto", "triton", "torch"], device: torch.device) -> Kernels:
    """Return the implementation for pools on `device`, and log it with the reason, once for each process and device.

    On a GPU this compiles and runs a small kernel, which can take seconds, unless plain torch is set. With ``auto``, plain torch
    is the fallback.

    Args:
        setting: The setting `kernels`.

    Raises:
        ConfigError: The setting is ``triton``, and the pool is in host memory, or Triton does not work on the GPU.
    """
    if setting == "torch":
        log.info("kernels_chosen", kernels="torch", device=str(device), reason="kernels is torch")
        return Kernels.TORCH
    if device.type == "cpu":
        if setting == "triton":
            raise ConfigError("kernels is triton, and the pool is in host memory, where Triton does not run: set it to auto")
        kernels = Kernels.fastest(device)
        built = "of this version" if kernels is Kernels.COMPILED else "missing, or of another version"
        reason = f"the pool is in host memory, and the compiled code is {built}"
        log.info("kernels_chosen", kernels=kernels.value, device=str(device), reason=reason)
        return kernels
    defect = triton_defect(device)
    if not defect:
        log.info("kernels_chosen", kernels="triton", device=str(device), reason="a kernel was compiled and gave the right result")
        return Kernels.TRITON
    if setting == "triton":
        raise ConfigError(f"kernels is triton, and Triton does not work on {device} ({defect}): fix that, or set it to auto")
    log.warning(
        "triton_unusable",
        kernels="torch",
        device=str(device),
        reason=defect,
        advice="plain torch is slower: fix the cause, or set kernels to torch to accept it",
    )
    return Kernels.TORCH


def triton_defect(device: torch.device) -> str:
    """Compile and run a kernel on `device`. Return what is wrong, in one line; empty if it gave the right result.

    Under TRITON_INTERPRET=1 the device may also be the CPU.
    """
    try:
        from transfer.copy.words import add_words  # imports Triton

        total = torch.zeros(1, dtype=torch.int64, device=device)
        add_words(total, torch.arange(PROBE_BYTES, dtype=torch.uint8, device=device), PROBE_BYTES)
        found = int(total) % 2**64
    except Exception as error:  # a missing compiler, package or driver: Triton has no error type for these
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    expected = digest(bytes(range(PROBE_BYTES)), DIGEST_WORDS)
    return "" if found == expected else f"a kernel computed {found:#x} in place of {expected:#x}"
