"""Examples run as they are shown; they use public names only, and the README links to them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_runs(example: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr
    assert f"](examples/{example.name})" in (ROOT / "README.md").read_text(encoding="utf-8")
    code = example.read_text(encoding="utf-8")
    assert re.findall(r"(?<!\bself)\._[a-z]\w*|^from \S+ import .*\b_[a-z]\w*|^from \S*\._[a-z]\S* import", code, re.M) == []
