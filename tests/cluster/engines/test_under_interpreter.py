"""The Triton kernels without a GPU: all their cases, and whole models, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.embedded_engine.interpreter import RUN_S, run_interpreted

FILES = ("kernels", "decode", "device_decode", "sparse", "tiered")


@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("file", FILES)
def test_all_cases(file: str) -> None:
    run_interpreted(Path(__file__).with_name(f"{file}_under_interpreter.py"))
