"""What holds for every transport test."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def one_device_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX on the loopback device alone, as nodes on a loopback address have it: tests beside these make and remove interfaces of
    this machine, and two ends that see different ones may find no way to each other."""
    if "UCX_NET_DEVICES" not in os.environ:
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
