"""The kernels compiled for GPUs that are not here: that they compile, and move 16 bytes at a time where they can."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transfer.kernels.copy_kernel import copy_pieces, piece_words
from transfer.kernels.head_slice import DEFAULT_TUNING
from transfer.kernels.page_kernel import copy_segments
from transfer.kernels.words import sum_words

pytestmark = pytest.mark.skipif(
    bool(triton.knobs.runtime.interpret), reason="TRITON_INTERPRET is set: its functions are not compiled"
)

COPY: dict[str, Any] = {
    "ROW": 64,
    "HEADS": 1,
    "PIECE": 64,
    "PAGE_SIZE": 16,
    "PAGE_STRIDE": 2048,
    "TOKEN_STRIDE": 128,
    "HEAD_STRIDE": 0,
    "OFFSET_TYPE": tl.int32,
    "POOL_TYPE": tl.int64,
    "WIRE_TYPE": tl.int64,
    "POOL_ALIGN": 2,
    "WIRE_ALIGN": 2,
    "WIRE_BYTES": 8,
    "IS_CONVERSION": False,
    "IS_SCALED": False,
    "IS_NATIVE": True,
    "SOURCE_KIND": "bfloat16",
    "TARGET_KIND": "bfloat16",
    "IS_GATHER": True,
    "HAS_DIGEST": False,
    "TILE_PIECES": 16,
}
NARROW = {
    **COPY,
    "ROW": 256,
    "POOL_TYPE": tl.uint16,
    "WIRE_TYPE": tl.uint8,
    "POOL_ALIGN": 8,
    "WIRE_ALIGN": 16,
    "WIRE_BYTES": 1,
    "IS_CONVERSION": True,
    "IS_SCALED": True,
    "TARGET_KIND": "float8_e4m3fn",
    "PIECE": 256,
    "PAGE_STRIDE": 8192,
    "TOKEN_STRIDE": 512,
}
WIDEN = {**NARROW, "IS_GATHER": False, "SOURCE_KIND": "float8_e4m3fn", "TARGET_KIND": "bfloat16"}


def compiled(kernel: Any, constants: dict[str, Any], capability: int, num_warps: int = 4) -> Any:
    types = {"first_piece": "i32", "end_piece": "i32"}
    names: list[str] = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i64") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(name),): constants[name] for name in constants})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})


def ptx(kernel: Any, constants: dict[str, Any], capability: int) -> str:
    text: str = compiled(kernel, constants, capability).asm["ptx"]
    return text


def widths(text: str, access: str) -> set[int]:
    """Bytes of every access to global memory of that kind (``ld`` or ``st``) that moves several words at once."""
    found = re.findall(rf"{access}\.global\.v(\d)\.b(\d+)", text)
    return {int(count) * int(bits) // 8 for count, bits in found}


SHAPES: dict[str, dict[str, Any]] = {
    "a tile in a page": {"PAGE_SIZE": 64, "PAGE_STRIDE": 8192},
    "pages in a tile": {"PAGE_SIZE": 1, "PAGE_STRIDE": 128},
    "heads": {"ROW": 32, "HEADS": 2, "PIECE": 32, "TOKEN_STRIDE": 32, "HEAD_STRIDE": 1024, "TILE_PIECES": 32},
    "latents": {"ROW": 144, "PIECE": 16, "PAGE_SIZE": 64, "PAGE_STRIDE": 9216, "TOKEN_STRIDE": 144, "TILE_PIECES": 64},
    "latents in pages of 1": {
        "ROW": 144,
        "PIECE": 16,
        "PAGE_SIZE": 1,
        "PAGE_STRIDE": 144,
        "TOKEN_STRIDE": 144,
        "TILE_PIECES": 64,
    },
    "beyond 32 bits": {"OFFSET_TYPE": tl.int64, "PAGE_STRIDE": 2**40, "TOKEN_STRIDE": 2**30},
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("is_gather", [True, False])
@pytest.mark.parametrize("has_digest", [False, True])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_copies_move_16_bytes_at_a_time(shape: str, has_digest: bool, is_gather: bool, capability: int) -> None:
    constants = {**COPY, **SHAPES[shape], "HAS_DIGEST": has_digest, "IS_GATHER": is_gather}
    text = ptx(copy_pieces, constants, capability)
    assert widths(text, "ld") == widths(text, "st") == {16}
    assert text.count("atom.global") == int(has_digest)  # one addition for all words of a program


# A multiprocessor has 65,536 registers, and place for 2048 threads with 32 of them each.
@pytest.mark.parametrize("is_gather", [True, False])
@pytest.mark.parametrize("has_digest", [False, True])
@pytest.mark.parametrize("shape", ["a tile in a page", "pages in a tile", "heads", "latents"])
def test_programs_take_few_registers(shape: str, has_digest: bool, is_gather: bool, tmp_path: Path) -> None:
    tuning = DEFAULT_TUNING
    words, num_warps = (tuning.digest_words, tuning.digest_warps) if has_digest else (tuning.copy_words, tuning.copy_warps)
    constants = {**COPY, **SHAPES[shape], "HAS_DIGEST": has_digest, "IS_GATHER": is_gather}
    constants["TILE_PIECES"] = words // constants["PIECE"]
    binary = tmp_path / "copy.cubin"
    binary.write_bytes(compiled(copy_pieces, constants, 90, num_warps).asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    (registers,) = re.findall(r"REG:(\d+)", told)
    assert int(registers) <= 32
    assert "STACK:0 " in told  # nothing is spilled


@pytest.mark.parametrize("constants", [NARROW, WIDEN], ids=["narrow", "widen"])
def test_conversions_use_the_devices_own_instructions_where_it_has_them(constants: dict[str, Any]) -> None:
    native, by_hand = ptx(copy_pieces, constants, 90), ptx(copy_pieces, {**constants, "IS_NATIVE": False}, 80)
    assert "e4m3x2" in native and "e4m3" not in by_hand
    assert 16 in widths(native, "ld") and 16 in widths(native, "st")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("is_source_packed", "is_target_packed"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize(("segment", "columns"), [(4096, 512), (32, 32), (144, 16), (9216, 512)])
def test_pages_are_moved_16_bytes_at_a_time(
    segment: int, columns: int, is_source_packed: bool, is_target_packed: bool, capability: int
) -> None:
    constants = {
        "NUM_SEGMENTS": 64,
        "SEGMENT": segment,
        "SOURCE_STRIDE": segment,
        "TARGET_STRIDE": 64 * segment,
        "IS_SOURCE_PACKED": is_source_packed,
        "IS_TARGET_PACKED": is_target_packed,
        "WORD_TYPE": tl.int64,
        "IS_ALIGNED": True,
        "COLUMNS": columns,
        "ROWS": 1024 // columns,
    }
    text = ptx(copy_segments, constants, capability)
    assert widths(text, "ld") == widths(text, "st") == {16}


@pytest.mark.parametrize(("part", "num_bytes"), [(tl.uint64, 8), (tl.uint8, 1)])
def test_passes_over_a_wire_compile(part: Any, num_bytes: int) -> None:
    text = ptx(sum_words, {"PART_TYPE": part, "PART_BYTES": num_bytes, "BLOCK": 1024}, 90)
    assert text.count("atom.global") == 1


@pytest.mark.parametrize(
    ("row", "most", "columns"),
    [(1, 512, 1), (3, 512, 4), (16, 512, 16), (64, 512, 64), (144, 512, 16), (513, 512, 64), (130, 512, 16), (1024, 512, 512)],
)
def test_pieces_waste_little(row: int, most: int, columns: int) -> None:
    assert piece_words(row, most) == columns
