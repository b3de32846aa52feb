"""Examples run as they are shown, and use nothing that is not theirs to use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_it_runs(example: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout and not done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_it_uses_public_names_only(example: Path) -> None:
    """An underscore is fine on what the example itself defines: attributes of `self`."""
    tree = ast.parse(example.read_text(encoding="utf-8"))
    private = [
        f"{node.lineno}: {node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]
    private += [
        f"{node.lineno}: {alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.startswith("_")
        or any(part.startswith("_") for part in (node.module or "").split(".") if part != "__future__")
    ]
    assert private == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_the_readme_points_to_it(example: Path) -> None:
    assert f"](examples/{example.name})" in (ROOT / "README.md").read_text(encoding="utf-8")
