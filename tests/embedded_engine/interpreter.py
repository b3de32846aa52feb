"""Run files of tests under Triton's interpreter, which is chosen when Triton is imported: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 1800  # only ends a run that would not end: the interpreter takes minutes on a busy machine


def run_interpreted(*files: Path) -> None:
    """Fail with the output of pytest unless every test of the files passes."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", str(RUN_S), "-p", "no:cacheprovider", *map(str, files)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
