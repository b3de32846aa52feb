"""A plugin of pytest (``-p tests.rdma.witness``): the tests of `LANE` alone, and each one's bytes seen on the RDMA device.

What a test wrote in its own process is held against the packets that the device took in while the test ran: it fails where those
cannot have held the bytes, or where so many bytes went over the loopback device that they may have taken that way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transfer.transport.nixl_session import NixlOperation

LANE = "nixl-net"
DEVICE = "rxe0"
PACKET_BYTES = 4096  # the most that a RoCE packet holds of a message
PACKETS = Path(f"/sys/class/infiniband/{DEVICE}/ports/1/hw_counters/rcvd_pkts")
LOOPBACK = Path("/sys/class/net/lo/statistics/rx_bytes")
_BULK_BYTES = 1 << 20  # below, the loopback device's other uses would be in the way: control messages, tests of TCP


class Count:
    """What the devices have counted since this was made."""

    def __init__(self) -> None:
        self._packets, self._loopback_bytes = int(PACKETS.read_text()), int(LOOPBACK.read_text())

    @property
    def packets(self) -> int:
        return int(PACKETS.read_text()) - self._packets

    @property
    def loopback_bytes(self) -> int:
        return int(LOOPBACK.read_text()) - self._loopback_bytes

    def objection(self, num_bytes: int) -> str | None:
        """Why `num_bytes` cannot have gone over the RDMA device alone, or None."""
        packets, loopback_bytes = self.packets, self.loopback_bytes
        if packets * PACKET_BYTES < num_bytes:
            return f"{num_bytes} bytes were written, and {DEVICE} received {packets} packets of at most {PACKET_BYTES} bytes"
        if num_bytes >= _BULK_BYTES and loopback_bytes >= num_bytes:
            return f"{num_bytes} bytes were written, and the loopback device carried {loopback_bytes}"
        return None


class Witness:
    """Counts the bytes of the writes that NIXL reports as done, by wrapping `NixlOperation.settle`."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.whole = Count()
        self.total_bytes = 0
        settle = NixlOperation.settle

        def counted(operation: NixlOperation, num_bytes: int = 0) -> None:
            settle(operation, num_bytes)
            self.num_bytes += operation.num_bytes

        setattr(NixlOperation, "settle", counted)  # noqa: B010

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        self.num_bytes, count = 0, Count()
        yield
        self.total_bytes += self.num_bytes
        if objection := count.objection(self.num_bytes):
            pytest.fail(objection)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.line(
            f"{DEVICE}: {self.whole.packets} packets received; {self.total_bytes} bytes written by the tests' own processes, "
            f"{self.whole.loopback_bytes} bytes over the loopback device"
        )


def pytest_configure(config: pytest.Config) -> None:
    if not PACKETS.exists():
        raise pytest.UsageError(f"there is no RDMA device {DEVICE} here: make test-rdma")
    config.pluginmanager.register(Witness(), "rdma-witness")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the suites of all transports, the tests of one lane."""
    left_out = [item for item in items if not _is_of_lane(item)]
    items[:] = [item for item in items if _is_of_lane(item)]
    config.hook.pytest_deselected(items=left_out)


def _is_of_lane(item: pytest.Item) -> bool:
    if item.path.parent.name == "rdma":
        return True
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return LANE in [value for value in parameters.values() if isinstance(value, str)]
