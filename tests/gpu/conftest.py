"""Small models for tests on a GPU; and what a run there found out beside passed and failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.demo_model import make_demo_model
from tests.engine.families import make_family
from tests.gpu.small_engines import Directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    """The directory of the demo's model ("llama"), or of a family's, made when it is first asked for."""
    parent = tmp_path_factory.mktemp("models")

    def directory_of(name: str) -> Path:
        directory = parent / name
        if directory.exists():
            return directory
        return make_demo_model(directory) if name == "llama" else make_family(name, directory)

    return directory_of


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each model and type: the decode steps that were captured in CUDA graphs, behind all tests."""
    found = {
        str(value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for name, value in report.user_properties
        if name == "captured"
    }
    for line in sorted(found):
        terminalreporter.write_line(f"captured {line}")
