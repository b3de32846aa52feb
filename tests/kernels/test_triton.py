"""Each Triton kernel of `transfer.copy` once under Triton's interpreter; tests/cluster/engines has the further cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.embedded_engine.interpreter import RUN_S, run_interpreted


@pytest.mark.timeout(RUN_S)
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("under_interpreter.py"))
