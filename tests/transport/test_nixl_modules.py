"""NIXL's UCX loads no module for Amazon's EFA where there is no such device: it may cost the process its exit status."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from transfer.transport import nixl_library


class Engine:
    """NIXL's agent, as far as it makes a backend; keeps the modules that UCX was to load."""

    made: ClassVar[list[Engine]] = []

    def __init__(self, name: str, config: Any) -> None:
        self.modules: str | None = "not asked"
        self.made.append(self)

    def getAvailPlugins(self) -> list[str]:
        return ["UCX"]

    def createBackend(self, backend: str, parameters: dict[str, str]) -> object:
        self.modules = os.environ.get("UCX_MODULES")
        return object()


LIB: Any = SimpleNamespace(nixlAgentConfig=SimpleNamespace, nixlAgent=Engine, NIXL_THREAD_SYNC_NONE=0)


def device(folder: Path, name: str, driver: str) -> None:
    """As the kernel lists an RDMA device in /sys/class/infiniband."""
    (folder / "drivers" / driver).mkdir(parents=True, exist_ok=True)
    (folder / "devices" / name / "device").mkdir(parents=True)
    (folder / "devices" / name / "device" / "driver").symlink_to(folder / "drivers" / driver)


@pytest.mark.parametrize(
    ("devices", "environment", "loaded"),
    [
        ({}, None, "^efa"),
        ({"mlx5_0": "mlx5_core"}, None, "^efa"),
        ({"mlx5_0": "mlx5_core", "rdmap0s6": "efa"}, None, None),
        ({}, "ib", "ib"),
    ],
)
def test_modules_that_ucx_loads(
    devices: dict[str, str], environment: str | None, loaded: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, driver in devices.items():
        device(tmp_path, name, driver)
    monkeypatch.setattr(nixl_library, "RDMA_DEVICES", tmp_path / "devices")
    monkeypatch.delenv("UCX_MODULES", raising=False)
    if environment is not None:
        monkeypatch.setenv("UCX_MODULES", environment)
    nixl_library.Agent(LIB, "UCX", {}, is_target=True)
    assert Engine.made[-1].modules == loaded
    assert os.environ.get("UCX_MODULES") == environment


@pytest.mark.parametrize(
    ("devices", "verbs", "tls", "net_devices", "is_tcp"),
    [
        ((), (), "all", "all", True),
        (("mlx5_0",), (), "all", "all", True),  # a container that sees the host's devices and has none
        (("mlx5_0",), ("uverbs0",), "all", "all", False),
        (("mlx5_0",), ("uverbs0",), "tcp,self", "all", True),
        (("mlx5_0",), ("uverbs0",), "rc,ud", "mlx5_0:1", False),
        (("mlx5_0",), ("uverbs0",), "all", "eth0", True),
        (("mlx5_0",), ("uverbs0",), "all", "lo", True),
    ],
)
def test_rdma_is_a_device_that_may_be_used(
    devices: tuple[str, ...],
    verbs: tuple[str, ...],
    tls: str,
    net_devices: str,
    is_tcp: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder, names in (("devices", devices), ("verbs", verbs)):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    monkeypatch.setattr(nixl_library, "RDMA_DEVICES", tmp_path / "devices")
    monkeypatch.setattr(nixl_library, "RDMA_VERBS", tmp_path / "verbs")
    assert nixl_library.has_only_tcp(tls, net_devices) is is_tcp
