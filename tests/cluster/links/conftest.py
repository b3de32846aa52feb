"""Fixtures for all tests of links."""

from __future__ import annotations

from tests.transport.conftest import one_device_that_stays

__all__ = ["one_device_that_stays"]
