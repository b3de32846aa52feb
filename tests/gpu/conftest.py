"""Marks and small models for tests on a GPU, and a summary of what a run there found out beside passed and failed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers

from embedded_engine.recurrent_state import NEEDED_TRANSFORMERS
from kvferry.demo.model import make_demo_model
from tests.embedded_engine.families import make_family
from tests.embedded_engine.steps import Directory

# By default, CUDA maps all streams of a process to 8 queues of the device, and a stream waits for the others of its queue. Tests
# look at a stream while another one is busy.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

GATED_DELTA_NETS = {"qwen3_next", "qwen3_next_moe", "hybrid"}
"""Families, and the kind of the demo model."""


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py looks for the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as `gpu`, and skip it if torch sees no device."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs CUDA: this torch sees no device"))


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


@pytest.fixture(autouse=True)
def _skip_without_gated_delta_nets(request: pytest.FixtureRequest) -> None:
    """Skip models with gated delta nets if the installed transformers keeps their states in a cache of its own."""
    values = {str(value) for value in request.node.callspec.params.values()} if hasattr(request.node, "callspec") else set()
    if values & GATED_DELTA_NETS and not hasattr(transformers.Cache, "get_conv_state"):
        pytest.skip(f"gated delta nets need transformers {NEEDED_TRANSFORMERS}: {transformers.__version__} is installed")


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
