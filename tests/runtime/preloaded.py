"""Modules that the fork server of these tests imports once: the rank entries, and pytest, which every rank would import again."""

import pytest

from tests.runtime import rank_entries

__all__ = ["pytest", "rank_entries"]
