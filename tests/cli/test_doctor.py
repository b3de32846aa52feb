"""Each check tells right from wrong, and this machine, on which the tests run, is well."""

from __future__ import annotations

import os
import resource

import pytest

from kvferry.doctor import command as doctor
from kvferry.doctor import host
from kvferry.doctor.devices import check_gpu
from kvferry.doctor.finding import Finding, State
from kvferry.doctor.loopback import LoopbackResult
from transfer.errors import EngineError


@pytest.mark.parametrize(
    ("finding", "state"),
    [
        (host.check_python((3, 11, 0)), State.OK),
        (host.check_python((3, 10, 12)), State.FAIL),
        (host.check_packages(lambda name: "1"), State.OK),
        (host.check_packages(lambda name: None if name == "triton" else "1"), State.FAIL),
        (host.check_ucx("UCX 1", ["self/memory", "tcp/eth0"], []), State.OK),
        (host.check_ucx("UCX 1", ["self/memory", "tcp/eth0"], ["mlx5_0"]), State.WARN),
        (host.check_ucx("UCX 1", ["self/memory", "rc_mlx5/mlx5_0:1"], ["mlx5_0"]), State.OK),
        (host.check_ucx("UCX 1", ["cma/memory"], []), State.FAIL),
        (host.check_shared_memory(1 << 30, 1 << 30), State.OK),
        (host.check_shared_memory(64 << 20, 64 << 20), State.WARN),
        (host.check_ptrace_scope(None), State.OK),
        (host.check_ptrace_scope("1"), State.WARN),
        (host.check_memlock(8 << 20, has_rdma=True), State.WARN),
        (host.check_memlock(resource.RLIM_INFINITY, has_rdma=True), State.OK),
        (host.check_open_files(5375), State.WARN),
        (check_gpu(True, "2.13.0+cpu"), State.WARN),
        (check_gpu(True, "2.13.0+cu130"), State.OK),
    ],
)
def test_each_check_tells_right_from_wrong(finding: Finding, state: State) -> None:
    assert finding.state is state
    assert bool(finding.fix) == (state is not State.OK)


def test_a_slow_transfer_warns_and_a_failed_one_fails() -> None:
    def measured(bytes_per_s: float) -> LoopbackResult:
        return LoopbackResult(lane="ucx/net", latency_s=1e-4, bandwidth_bytes_per_s=bytes_per_s)

    def failing(name: str) -> LoopbackResult:
        raise EngineError("no way to the peer")

    assert doctor.check_transfer("ucx", lambda name: measured(4e9)).state is State.OK
    assert doctor.check_transfer("ucx", lambda name: measured(1e8)).state is State.WARN
    finding = doctor.check_transfer("ucx", failing)
    assert finding.state is State.FAIL and finding.text == "no way to the peer"


def test_ports_can_be_had_here() -> None:
    found = host.check_ports()
    assert found.state is State.OK and "--node-config" in found.text, "it says what it has not looked at"
    assert os.environ.get("UCX_TLS") is None
