from __future__ import annotations

from tests.connector.conftest import pair, start

__all__ = ["pair", "start"]
