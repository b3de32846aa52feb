"""`kvferry doctor`: checks of this machine, each with the command that fixes it."""

from __future__ import annotations

import asyncio
import json
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Final

from rich.console import Console

from kvferry.doctor.devices import check_gpu, check_gpu_direct, check_peers, check_rdma, look_at_peers, rdma_devices, read_ports
from kvferry.doctor.finding import Finding, State, fail, ok, read_line, warn
from kvferry.doctor.host import (
    check_clock,
    check_compiled_copies,
    check_memlock,
    check_open_files,
    check_packages,
    check_ports,
    check_ptrace_scope,
    check_python,
    check_shared_memory,
    check_versions,
    has_compiled_copies,
    installed_version,
    pinned_versions,
    read_clock,
    required_versions,
    shared_memory,
    ucx_devices,
)
from kvferry.doctor.loopback import LoopbackResult, measure_loopback
from kvferry.doctor.node import check_configured_ports, check_node, look_at_node
from node_runtime import exit_codes
from transfer.config import ServerConfig
from transfer.errors import TransferError
from transfer.registry.security import Security

SLOW_BYTES_PER_S: Final = 0.5e9  # UCX over loopback TCP gives 1 to 2.7 GB/s, shared memory 4 to 7
_ROOT: Final = Path("/")
_STYLES: Final = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red"}


def run_doctor(
    *, is_json: bool, nodes: Sequence[str] = (), security: Security | None = None, servers: Sequence[ServerConfig] = ()
) -> int:
    """Run all checks, print what they find, and return the exit code.

    Args:
        nodes: host:port of nodes to compare this machine with.
        servers: Addresses on which nodes are to listen on this machine.

    Raises:
        ConfigError: A node must not be called like this.
    """
    found = chain(examine(), *map(check_configured_ports, servers), *(examine_node(address, security) for address in nodes))
    console = Console(highlight=False)
    findings: list[Finding] = []
    for finding in found:
        findings.append(finding)
        if not is_json:
            console.print(f"[{_STYLES[finding.state]}]{finding.state:<4}[/]", end=" ")
            console.print(f"{finding.name}: {finding.text}", markup=False, soft_wrap=True)
            if finding.fix:
                console.print(f"     fix: {finding.fix}", markup=False, soft_wrap=True)
    is_ok = all(finding.state is not State.FAIL for finding in findings)
    if is_json:
        print(json.dumps({"findings": [asdict(one) for one in findings], "ok": is_ok}, indent=2))
    return exit_codes.OK if is_ok else exit_codes.FAILED


def examine(root: Path = _ROOT) -> Iterator[Finding]:
    """Yield the findings about this machine. The transfers between two processes take a few seconds.

    Args:
        root: Directory of /sys, /proc and /dev.
    """
    yield check_python(sys.version_info[:3])
    yield check_packages(installed_version)
    yield check_versions(installed_version, required_versions(), pinned_versions())
    yield check_compiled_copies(has_compiled_copies())
    devices = rdma_devices(root)
    yield ucx_devices(devices)
    yield from check_rdma(list(read_ports(root)), has_verbs=bool(list((root / "dev/infiniband").glob("uverbs*"))))
    yield check_shared_memory(*shared_memory())
    yield check_ptrace_scope(read_line(root / "proc/sys/kernel/yama/ptrace_scope"))
    yield check_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_rdma=bool(devices))
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])  # the hard limit, to which each rank raises its own
    yield check_ports()
    yield check_clock(read_clock())
    has_gpu = bool(list((root / "dev").glob("nvidia[0-9]*")))
    gpu = check_gpu(has_gpu, installed_version("torch"))
    yield gpu
    if has_gpu and gpu.state is State.OK:
        yield check_peers(look_at_peers())
    direct = check_gpu_direct(
        has_gpu=has_gpu,
        has_rdma=bool(devices),
        has_peermem=(root / "sys/module/nvidia_peermem").exists(),
        driver=read_line(root / "proc/driver/nvidia/version") or "",
        kernel=platform.release(),
    )
    if direct is not None:
        yield direct
    for transport in transports_here(installed_version, has_gpu=has_gpu):
        yield check_transfer(transport, measure_loopback)


def examine_node(address: str, security: Security | None) -> Iterator[Finding]:
    """Yield the findings about a node that runs."""
    has_gpu = bool(list(Path("/dev").glob("nvidia[0-9]*")))
    look = asyncio.run(look_at_node(address, security))
    yield from check_node(look, transports=transports_here(installed_version, has_gpu=has_gpu))


def transports_here(version_of: Callable[[str], str | None], *, has_gpu: bool) -> tuple[str, ...]:
    """Return the transports of this machine: `shm`, `ucx` and `nixl` if installed, and `cuda_ipc` if there is also a GPU."""
    has_ucx = version_of("ucxx-cu13") or version_of("ucxx-cu12")
    has_nixl = version_of("nixl-cu13") or version_of("nixl-cu12")
    has_cuda_ipc = has_gpu and version_of("cuda-bindings")
    return ("shm", *(("ucx",) if has_ucx else ()), *(("nixl",) if has_nixl else ()), *(("cuda_ipc",) if has_cuda_ipc else ()))


def check_transfer(transport: str, measure: Callable[[str], LoopbackResult]) -> Finding:
    """Check a transfer between two processes."""
    name = f"transfer over {transport}"
    try:
        result = measure(transport)
    except TransferError as error:
        return fail(name, str(error), "see the lines above; UCX_LOG_LEVEL=info logs more")
    text = f"{result.bandwidth_bytes_per_s / 1e9:.2f} GB/s, {result.latency_s * 1e6:,.0f} us, lane {result.lane}, bytes equal"
    if result.bandwidth_bytes_per_s < SLOW_BYTES_PER_S:
        fix = "run it again on an idle machine; if the lane ends with /net, permit cross-memory attach"
        return warn(name, text, fix)
    return ok(name, text)
