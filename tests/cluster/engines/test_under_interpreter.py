"""The decode kernels in all their cases, and in whole models, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.embedded_engine.interpreter import RUN_S, run_interpreted

FILES = ("decode_under_interpreter.py", "device_decode_under_interpreter.py", "tiered_under_interpreter.py")


@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("file", FILES)
def test_all_cases(file: str) -> None:
    run_interpreted(Path(__file__).with_name(file))
