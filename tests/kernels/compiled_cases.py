"""The kernels compiled for GPUs that are not here: cases, and what each must show in the code that comes out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transfer.copy.copy_kernel import copy_pieces
from transfer.copy.digest import WORD_BYTES
from transfer.copy.head_slice import DEFAULT_TUNING
from transfer.copy.page_kernel import copy_segments
from transfer.copy.words import sum_words

COPY: dict[str, Any] = {
    "num_buffers": None,
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
    types = {"first_piece": "i32", "end_piece": "i32", "num_buffers": "i32"}
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


def check_copy(shape: str, *, has_digest: bool, is_gather: bool, capability: int, has_few_programs: bool = False) -> None:
    """It moves 16 bytes at a time, and adds the words of a program to a digest once: behind the loop, if there is one."""
    constants = {**COPY, **SHAPES[shape], "HAS_DIGEST": has_digest, "IS_GATHER": is_gather}
    if has_few_programs:
        del constants["num_buffers"]
    assembly = compiled(copy_pieces, constants, capability).asm
    text, *loops = assembly["ptx"], *re.findall(r"scf\.for.*?\n    }", assembly["ttgir"], re.DOTALL)
    assert widths(text, "ld") == widths(text, "st") == {16}
    assert text.count("atom.global") == int(has_digest)
    assert len(loops) == int(has_few_programs) and not any("atomic" in loop for loop in loops)


def check_registers(shape: str, folder: Path, *, has_digest: bool, is_gather: bool) -> None:
    """A multiprocessor has 65,536 registers, and place for 2048 threads with 32 of them each."""
    tuning = DEFAULT_TUNING
    words, num_warps = (tuning.digest_words, tuning.digest_warps) if has_digest else (tuning.copy_words, tuning.copy_warps)
    constants = {**COPY, **SHAPES[shape], "HAS_DIGEST": has_digest, "IS_GATHER": is_gather}
    constants["TILE_PIECES"] = words // constants["PIECE"]
    binary = folder / "copy.cubin"
    binary.write_bytes(compiled(copy_pieces, constants, 90, num_warps).asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    (registers,) = re.findall(r"REG:(\d+)", told)
    assert int(registers) <= 32
    assert "STACK:0 " in told  # nothing is spilled


def check_conversion(constants: dict[str, Any]) -> None:
    """It uses the device's own instructions where it has them."""
    native, by_hand = ptx(copy_pieces, constants, 90), ptx(copy_pieces, {**constants, "IS_NATIVE": False}, 80)
    assert "e4m3x2" in native and "e4m3" not in by_hand
    assert 16 in widths(native, "ld") and 16 in widths(native, "st")


def check_converted_digest(constants: dict[str, Any]) -> None:
    """The digest changes neither the accesses of a conversion nor the places of its elements, and adds to the sum once."""
    tuning = DEFAULT_TUNING
    words = tuning.digest_words * (WORD_BYTES // constants["WIRE_BYTES"])
    constants = {**constants, "TILE_PIECES": words // constants["PIECE"]}
    alone, digesting = (
        compiled(copy_pieces, {**constants, "HAS_DIGEST": has_digest}, 90, tuning.digest_warps).asm
        for has_digest in (False, True)
    )
    assert widths(digesting["ptx"], "ld") == widths(digesting["ptx"], "st") == {16}
    assert digesting["ttgir"].count("convert_layout") == alone["ttgir"].count("convert_layout")
    assert digesting["ptx"].count("atom.global") == 1


def check_page_move(segment: int, columns: int, *, is_source_packed: bool, is_target_packed: bool, capability: int) -> None:
    """It moves 16 bytes at a time."""
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


def check_pass(part: Any, num_bytes: int) -> None:
    """A pass over a wire compiles, and adds to its digest once."""
    text = ptx(sum_words, {"PART_TYPE": part, "PART_BYTES": num_bytes, "BLOCK": 1024}, 90)
    assert text.count("atom.global") == 1
