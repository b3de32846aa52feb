"""Joining a group of ranks: what is refused, and a rank that stays alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embedded_engine.tensor_parallel import init_distributed
from transfer.errors import ConfigError, EngineError


def test_joining_alone_ends_and_says_where(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    with pytest.raises(EngineError, match=f"rank 0 of 2 did not meet the others at {store}"):
        init_distributed(0, 2, store, timeout_s=0.2)


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((0, 1, "file:///x"), {}, "rank is 0 of 1"),
        ((2, 2, "file:///x"), {}, "rank is 2 of 2"),
        ((0, 2, "http://x"), {}, "init_method is 'http://x'"),
        ((0, 2, "file:///x"), {"timeout_s": 0}, "timeout_s is 0"),
    ],
)
def test_wrong_settings_of_a_group(arguments: tuple[int, int, str], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        init_distributed(*arguments, **options)
