"""A case of each kernel under Triton's interpreter; run by test_under_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from embedded_engine.kernels import block_sparse
from tests.embedded_engine.decode_cases import DecodeCase, assert_attends, assert_merges, assert_writes
from tests.embedded_engine.sparse_cases import CASES, assert_attends_sparsely
from transfer.layout import DType, TokenOrder

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


def test_paged_decode() -> None:
    assert_attends(DecodeCase(order=TokenOrder.HND, softcap=30.0, window_tokens=33, has_sinks=True, lengths=(150, 1, 0)))


def test_write_rows() -> None:
    assert_writes(DType.BFLOAT16, DType.FLOAT8_E4M3, TokenOrder.NHD)


def test_merge_partial() -> None:
    assert_merges(torch.bfloat16)


def test_block_sparse() -> None:
    assert_attends_sparsely(CASES["half"], block_sparse)
