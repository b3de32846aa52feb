"""What holds for every test: deterministic hypothesis runs in CI, no thread storms on small machines, honest GPU skips."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch: several processes of a test cluster share few cores, and each would start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared, loaded machine makes single examples slow at random; pytest-timeout bounds the whole test instead.
settings.register_profile("kvferry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("kvferry"), derandomize=True, print_blob=True)
# By hand, for hours: pytest --hypothesis-profile=soak --timeout=0 tests/protocol
settings.register_profile("soak", settings.get_profile("kvferry"), max_examples=20_000)
settings.load_profile("ci" if os.environ.get("CI") else "kvferry")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where the driver has no device node (told without importing torch)."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU: there is no /dev/nvidia0 here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(no_gpu)
