from __future__ import annotations

from tests.hosted.conftest import pair, start

__all__ = ["pair", "start"]
