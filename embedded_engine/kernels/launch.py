"""Shared by the launchers of the kernels."""

from __future__ import annotations

from typing import Any, Final

import triton

IS_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether Triton runs its kernels on the CPU; fixed when it is imported."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Queue a kernel on the current stream; one place for arguments that Triton does not type."""
    kernel[grid](*arguments, **constants)
