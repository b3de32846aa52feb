"""Fixtures of tests/embedded_engine, and groups of ranks in real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.engines.ranks import RankServer
from tests.embedded_engine.conftest import demo_dir, family_dir, generate, one_thread, prompts, qwen_dir

__all__ = ["demo_dir", "family_dir", "generate", "one_thread", "prompts", "qwen_dir"]


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Return a server that starts groups of ranks in real processes; end all of them after the tests."""
    server = RankServer(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()
