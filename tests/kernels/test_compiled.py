"""One case for each kernel, compiled for a GPU that is not here; tests/cluster/engines has every shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl

from tests.kernels.compiled_cases import (
    NARROW,
    WIDEN,
    check_conversion,
    check_converted_digest,
    check_copy,
    check_page_move,
    check_pass,
    check_registers,
)

pytestmark = pytest.mark.skipif(
    bool(triton.knobs.runtime.interpret), reason="TRITON_INTERPRET is set: its functions are not compiled"
)


@pytest.mark.parametrize("is_gather", [True, False])
def test_copies_move_16_bytes_at_a_time_with_few_registers(is_gather: bool, tmp_path: Path) -> None:
    check_copy("heads", has_digest=True, is_gather=is_gather, capability=90)
    check_registers("heads", tmp_path, has_digest=True, is_gather=is_gather)


def test_few_programs_add_to_the_digest_once() -> None:
    check_copy("heads", has_digest=True, is_gather=True, capability=90, has_few_programs=True)


def test_conversions_use_the_devices_own_instructions_where_it_has_them() -> None:
    check_conversion(NARROW)


@pytest.mark.parametrize("constants", [NARROW, WIDEN], ids=["gather", "scatter"])
def test_the_digest_of_a_conversion_moves_no_element_between_threads(constants: dict[str, Any]) -> None:
    check_converted_digest(constants)


def test_pages_are_moved_16_bytes_at_a_time() -> None:
    check_page_move(144, 16, is_source_packed=True, is_target_packed=False, capability=90)


def test_passes_over_a_wire_compile() -> None:
    check_pass(tl.uint64, 8)
