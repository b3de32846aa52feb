"""What page tables are checked for before a GPU has them; the tables themselves are tested in tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest

from node_runtime.request_tables import KnownPages
from transfer.errors import LayoutError


def test_pages_come_once_each() -> None:
    known = KnownPages(8, "a")
    known.add(np.array([-1, -1, 7, 0]))
    known.add(np.array([], dtype=np.int64))
    known.add(np.array([-1]))
    known.add(np.array([5, 2]))
    for again, page in (([1, 7], 7), ([3, 4, 3], 3), ([2], 2)):
        with pytest.raises(LayoutError, match=f"table of request a has page {page} twice"):
            known.add(np.array(again))
    known.add(np.array([1, 3, 4]))  # nothing of what was refused was taken in


def test_pages_are_of_the_pool() -> None:
    with pytest.raises(LayoutError, match=r"table of request b has page 8; the pool's are \[0, 8\)"):
        KnownPages(8, "b").add(np.array([0, 8]))
