"""Each kernel of the engine once under Triton's interpreter; tests/cluster/engines has all cases, and whole models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.embedded_engine.interpreter import RUN_S, run_interpreted


@pytest.mark.timeout(RUN_S)
def test_every_kernel() -> None:
    run_interpreted(Path(__file__).with_name("kernels_under_interpreter.py"))
