"""The demo model, made once for all tests of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.demo.model import make_demo_model


@pytest.fixture(scope="session")
def demo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "demo")
