"""The decode kernels, alone and in whole models, under Triton's interpreter: what they compute is checked without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVERS = ("decode_under_interpreter.py", "device_decode_under_interpreter.py", "tiered_under_interpreter.py")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_and_whole_models_under_the_interpreter(which: str) -> None:
    """The interpreter is chosen when Triton is imported, hence a process of its own; one, for it takes seconds to start."""
    folder = Path(__file__).parent
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            which,
            *(str(folder / one) for one in DRIVERS),
        ],
        cwd=folder.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
