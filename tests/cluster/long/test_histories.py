"""Thousands of histories of a simulated cluster; `--hypothesis-profile=soak` runs far more of them."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.protocol.histories import KINDS, play

NUM_HISTORIES = max(1000, settings().max_examples)

pytestmark = pytest.mark.timeout(1800 if NUM_HISTORIES == 1000 else 0)  # a marker is stronger than --timeout


@pytest.mark.parametrize("name", KINDS)
def test_whatever_goes_wrong_nothing_wrong_is_scattered_and_all_ends(name: str) -> None:
    play(KINDS[name], range(100, 100 + NUM_HISTORIES))
