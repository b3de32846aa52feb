"""Every shape of the kernels, compiled for GPUs that are not here; tests/kernels/test_compiled.py has one case for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl

from tests.kernels.compiled_cases import (
    NARROW,
    SHAPES,
    WIDEN,
    check_conversion,
    check_copy,
    check_page_move,
    check_pass,
    check_registers,
)

pytestmark = pytest.mark.skipif(
    bool(triton.knobs.runtime.interpret), reason="TRITON_INTERPRET is set: its functions are not compiled"
)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("is_gather", [True, False])
@pytest.mark.parametrize("has_digest", [False, True])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_copies_move_16_bytes_at_a_time(shape: str, has_digest: bool, is_gather: bool, capability: int) -> None:
    check_copy(shape, has_digest=has_digest, is_gather=is_gather, capability=capability)


@pytest.mark.parametrize("is_gather", [True, False])
@pytest.mark.parametrize("has_digest", [False, True])
@pytest.mark.parametrize("shape", ["a tile in a page", "pages in a tile", "heads", "latents"])
def test_programs_take_few_registers(shape: str, has_digest: bool, is_gather: bool, tmp_path: Path) -> None:
    check_registers(shape, tmp_path, has_digest=has_digest, is_gather=is_gather)


@pytest.mark.parametrize("constants", [NARROW, WIDEN], ids=["narrow", "widen"])
def test_conversions_use_the_devices_own_instructions_where_it_has_them(constants: dict[str, Any]) -> None:
    check_conversion(constants)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("is_source_packed", "is_target_packed"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize(("segment", "columns"), [(4096, 512), (32, 32), (144, 16), (9216, 512)])
def test_pages_are_moved_16_bytes_at_a_time(
    segment: int, columns: int, is_source_packed: bool, is_target_packed: bool, capability: int
) -> None:
    check_page_move(segment, columns, is_source_packed=is_source_packed, is_target_packed=is_target_packed, capability=capability)


@pytest.mark.parametrize(("part", "num_bytes"), [(tl.uint64, 8), (tl.uint8, 1)])
def test_passes_over_a_wire_compile(part: Any, num_bytes: int) -> None:
    check_pass(part, num_bytes)
