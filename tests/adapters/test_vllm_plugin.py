"""What vLLM finds of the plugin. tests/vllm/test_plugin.py has vLLM load it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from kvferry.vllm_plugin import MODULES, SCHEDULER, register

ROOT = Path(__file__).parents[2]


def test_the_entry_point_is_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"kvferry": f"{register.__module__}:{register.__name__}"}


def test_its_modules_have_the_classes_that_it_names() -> None:
    for name in (*(f"{module}.{name}" for name, module in MODULES.items()), SCHEDULER):
        module, _, kind = name.rpartition(".")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")  # vLLM, which it imports, is not here
        assert f"\nclass {kind}(" in source
