"""What commands import: help and plans load nothing that takes a second."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).resolve().parents[1] / "unit" / "configs" / "gemma-3-27b.json"
HEAVY = ("torch", "transformers", "numpy", "grpc", "zmq", "matplotlib", "ucxx")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], ("demo", "generate", "status", "doctor", "model")),
        (["plan", "--model", "{model}", "--device-memory", "80GiB"], ("tokens: ",)),
    ],
)
def test_a_command_is_light(tmp_path: Path, arguments: list[str], said: tuple[str, ...]) -> None:
    shutil.copy(CONFIG, tmp_path / "config.json")
    arguments = [one.format(model=tmp_path) for one in arguments]
    code = f"import sys, kvferry.__main__ as m\ntry: m.app({arguments!r})\nexcept SystemExit: pass\nprint(sorted(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [text for text in said if text not in output] == []
    assert [name for name in HEAVY if f"'{name}'" in output.splitlines()[-1]] == []
