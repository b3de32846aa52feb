"""What the README shows runs: its Python is executed, its commands and options exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [line.removeprefix("$ ") for language, text in BLOCKS if language == "console" for line in text.splitlines()]


def test_readme_shows_python_and_commands() -> None:
    assert PYTHON
    assert len(COMMANDS) > 8


@pytest.mark.parametrize("source", PYTHON)
def test_python_of_the_readme_runs(source: str) -> None:
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    "module, program", [("kvferry", "kvferry"), ("prefill_node", "prefill-node"), ("decode_node", "decode-node")]
)
def test_options_in_the_readme_exist(module: str, program: str) -> None:
    lines = [line.split(f".venv/bin/{program} ", 1)[1] for line in COMMANDS if f".venv/bin/{program} " in line]
    assert lines
    for words in {tuple(line.split()[: 2 if "model make" in line else 1]) for line in lines}:
        shown = subprocess.run(
            [sys.executable, "-m", module, *words, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            env={"COLUMNS": "200"},
        )
        assert shown.returncode == 0, shown.stderr
        for line in lines:
            if tuple(line.split()[: len(words)]) == words:
                for option in re.findall(r"(--[a-z-]+)", line.split("#")[0]):
                    assert option in shown.stdout, f"{program} {' '.join(words)} has no {option}"


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"`?make (\w+)", README)
    assert {"demo", "test", "bench"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"no target {target}"
