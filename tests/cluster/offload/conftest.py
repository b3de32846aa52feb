"""A folder for the store of a module's cluster."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")
