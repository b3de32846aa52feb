"""The decode kernels under Triton's interpreter; run by test_under_interpreter.py in a process that sets TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from embedded_engine.kernels.arguments import DecodeCall
from embedded_engine.kernels.paged_decode import paged_decode_attention
from tests.embedded_engine.decode_cases import (
    COLUMNS,
    MODEL_DTYPES,
    POOL_DTYPES,
    DecodeCase,
    assert_attends,
    assert_writes,
    attention_cases,
)
from transfer.layout import DType, TokenOrder

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

CASES = attention_cases()


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name: str) -> None:
    assert_attends(CASES[name])


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
def test_any_number_of_splits_gives_the_same(num_splits: int) -> None:
    assert_attends(DecodeCase(lengths=(540, 385, 2), has_sinks=True), num_splits=num_splits)
    assert_attends(DecodeCase(lengths=(540, 128), window_tokens=200), num_splits=num_splits)


def test_lengths_are_cut_at_the_columns() -> None:
    arguments = DecodeCase(lengths=(COLUMNS,)).arguments()
    right = paged_decode_attention(DecodeCall(**arguments))[0][0]
    arguments["lengths"][0] = COLUMNS + 100
    assert torch.equal(paged_decode_attention(DecodeCall(**arguments))[0][0], right)
    arguments["lengths"][0] = -3
    assert paged_decode_attention(DecodeCall(**arguments))[0][0].eq(0).all()


def test_a_number_that_is_none_stays_one() -> None:
    """The engine tells damaged KV by logits that are not finite: no kernel may turn it into zeros."""
    arguments = DecodeCase(lengths=(200, 20)).arguments()
    slot = int(arguments["slots"][1, 50])
    arguments["k"][slot // 16, slot % 16, 1, 3] = float("nan")
    out = paged_decode_attention(DecodeCall(**arguments))[0]
    assert out[0, 2:].isnan().all() and not out[0, :2].isnan().any() and not out[1].isnan().any()


@pytest.mark.parametrize("order", list(TokenOrder))
@pytest.mark.parametrize("pool_dtype", POOL_DTYPES)
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_written_rows_are_the_reference_s(dtype: DType, pool_dtype: DType, order: TokenOrder) -> None:
    assert_writes(dtype, pool_dtype, order)


def test_rows_of_a_layer_without_v() -> None:
    assert_writes(DType.BFLOAT16, DType.FLOAT8_E4M3, TokenOrder.NHD, has_v=False)
