"""Elements of a pool inside a Triton kernel.

Converted by hand, where the caller does not ask for the GPU's own instructions: exact on every GPU (float8 needs none that knows
it) and under Triton's interpreter, which truncates to bfloat16 where hardware rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from transfer.layout import DType

ELEMENT_TYPES = {
    DType.FLOAT32: tl.float32,
    DType.BFLOAT16: tl.uint16,
    DType.FLOAT16: tl.float16,
    DType.FLOAT8_E4M3: tl.uint8,
    DType.INT8: tl.int8,
}
"""As what a kernel loads and stores elements; bfloat16 and float8 as integers."""


@triton.jit  # type: ignore[untyped-decorator]
def widened(values, KIND: tl.constexpr, IS_NATIVE: tl.constexpr = False):  # type: ignore[no-untyped-def]  # Triton types them
    """Elements of KIND as float32, exact. IS_NATIVE: by the instructions of GPUs that know float8 (Ada, Hopper and later)."""
    if IS_NATIVE and KIND == "float8_e4m3fn":
        result = values.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == "bfloat16":
        result = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "float8_e4m3fn":
        bits = values.to(tl.uint32)
        magnitude = bits & 0x7F
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)  # exponent bias 7 -> 127
        number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)  # subnormals are multiples of 2**-9
        number = tl.where(magnitude == 0x7F, float("nan"), number)
        result = (number.to(tl.uint32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    else:
        result = values.to(tl.float32)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def narrowed(values, KIND: tl.constexpr, IS_NATIVE: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """float32 as elements of KIND, rounded to nearest even; float16 and float8 saturate, NaN stays NaN."""
    bits = values.to(tl.uint32, bitcast=True)
    if IS_NATIVE and KIND == "float8_e4m3fn":
        result = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # the instruction saturates
    elif IS_NATIVE and KIND == "bfloat16":
        result = values.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    elif KIND == "bfloat16":
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = tl.where(values != values, 0x7FC0, rounded).to(tl.uint16)
    elif KIND == "float8_e4m3fn":
        sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
        # Adding 2**14, whose last bit is worth 2**-9, makes the hardware round to multiples of the smallest subnormal.
        small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        rounded = tl.where(magnitude < 0x3C800000, small, normal)  # below 2**-6
        rounded = tl.where(magnitude > 0x43E00000, 0x7E, rounded)  # above 448
        result = (tl.where(magnitude > 0x7F800000, 0x7F, rounded) | sign).to(tl.uint8)
    elif KIND == "float16":
        beyond = tl.where(values < 0, -65504.0, 65504.0)
        result = tl.where(tl.abs(values) > 65504.0, beyond, values).to(tl.float16)
    else:
        result = values
    return result
