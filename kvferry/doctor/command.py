"""`kvferry doctor`: what this machine offers, each thing with the command that fixes it."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, Final

from kvferry.cli import exit_codes
from kvferry.doctor.clock import check_clock, read_clock
from kvferry.doctor.finding import Finding, State, fail, ok, read_line, warn
from kvferry.doctor.gpu import check_peers, look_at_peers
from kvferry.doctor.loopback import LoopbackResult, measure_loopback
from kvferry.doctor.node import check_node, look_at_node
from kvferry.doctor.ports import check_configured_ports, check_ports
from kvferry.doctor.rdma import check_gpu_direct, check_rdma, rdma_devices, read_ports
from kvferry.doctor.versions import check_versions, pinned_versions, required_versions
from transfer.config import ServerConfig
from transfer.errors import TransferError
from transfer.registry.options import FILES_OF_A_RANK, FILES_PER_SESSION, MAX_SESSIONS, most_sessions
from transfer.registry.security import Security

MIN_SHM_BYTES: Final = 256 << 20
"""Triton's and torch's own needs and UCX's queues fit; a container's default of 64 MiB is known to be too little for NCCL."""
MIN_OPEN_FILES: Final = FILES_OF_A_RANK + MAX_SESSIONS * FILES_PER_SESSION
"""For as many sessions as a decode rank ever takes."""
SLOW_BYTES_PER_S: Final = 0.5e9  # UCX over loopback TCP gives 1 to 2.7 GB/s, shared memory 4 to 7
NEEDED: Final = ("torch", "transformers", "triton", "grpcio", "pyzmq", "numpy", "msgpack", "xxhash")
_ROOT: Final = Path("/")
_RDMA: Final = re.compile(r"\b(?:rc|ud|dc|mlx5|rdmacm|srd|efa|gga)[a-z_0-9]*/")


def run_doctor(
    *, is_json: bool, nodes: Sequence[str] = (), security: Security | None = None, servers: Sequence[ServerConfig] = ()
) -> int:
    """Look at everything and print it; returns the exit code.

    Args:
        is_json: One JSON object instead of lines.
        nodes: host:port of nodes to compare this machine with.
        security: How they are called.
        servers: Where nodes are to listen on this machine.

    Raises:
        ConfigError: A node must not be called like this.
    """
    found = chain(examine(), *map(check_configured_ports, servers), *(examine_node(address, security) for address in nodes))
    if is_json:
        findings = list(found)
        print(json.dumps({"findings": [asdict(one) for one in findings], "ok": not _fails(findings)}, indent=2))
        return exit_codes.FAILED if _fails(findings) else exit_codes.OK
    from rich.console import Console

    console = Console(highlight=False)
    styles = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red"}
    findings = []
    for finding in found:
        findings.append(finding)
        console.print(f"[{styles[finding.state]}]{finding.state:<4}[/]", end=" ")
        console.print(f"{finding.name}: {finding.text}", markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"     fix: {finding.fix}", markup=False, soft_wrap=True)
    return exit_codes.FAILED if _fails(findings) else exit_codes.OK


def _fails(findings: list[Finding]) -> bool:
    return any(finding.state is State.FAIL for finding in findings)


def examine(root: Path = _ROOT) -> Iterator[Finding]:
    """Everything, one after the other; the transfer between two processes takes a few seconds.

    Args:
        root: Where /sys, /proc and /dev are looked for.
    """
    yield check_python(sys.version_info[:3])
    yield check_packages(installed_version)
    yield check_versions(installed_version, required_versions(), pinned_versions())
    devices = rdma_devices(root)
    yield ucx_devices(devices)
    yield from check_rdma(list(read_ports(root)), has_verbs=bool(list((root / "dev/infiniband").glob("uverbs*"))))
    yield check_shared_memory(*_shared_memory())
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
    """A node that runs, and how this machine gets along with it."""
    has_gpu = bool(list(Path("/dev").glob("nvidia[0-9]*")))
    look = asyncio.run(look_at_node(address, security))
    yield from check_node(look, transports=transports_here(installed_version, has_gpu=has_gpu))


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, without importing it; None: not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_python(version: tuple[int, ...]) -> Finding:
    text = f"{platform.python_implementation()} {'.'.join(map(str, version))}"
    if version >= (3, 11):
        return ok("python", text)
    return fail("python", text, "make setup PYTHON=python3.11 (3.11 is the oldest that will do)")


def check_packages(version_of: Callable[[str], str | None]) -> Finding:
    versions: Mapping[str, str | None] = {name: version_of(name) for name in NEEDED}
    missing = [name for name, version in versions.items() if version is None]
    text = ", ".join(f"{name} {version or 'MISSING'}" for name, version in versions.items())
    if missing:
        return fail("packages", text, f"pip install -c constraints.txt {' '.join(missing)}")
    return ok("packages", text)


def ucx_devices(rdma_devices: Sequence[str]) -> Finding:
    """UCX and UCXX: versions, and what UCX can send over here.

    Args:
        rdma_devices: Those that the kernel has.
    """
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        lib: Any = importlib.import_module("ucxx._lib.libucxx")
        context = lib.UCXContext({}, (lib.Feature.TAG, lib.Feature.WAKEUP))
        names = parse_ucx_resources(str(context.info))
        version = ".".join(map(str, lib.get_ucx_version()))
    except Exception as error:  # a missing package, a missing shared library, or UCX's own refusal
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return fail("ucx", text, "pip install 'kvferry[ucx-cu13]' (or ucx-cu12; no GPU needed)")
    wrapper = installed_version("ucxx-cu13") or installed_version("ucxx-cu12") or "of unknown version"
    return check_ucx(f"UCX {version}, ucxx {wrapper}", names, rdma_devices)


def check_ucx(what: str, names: Sequence[str], rdma_devices: Sequence[str]) -> Finding:
    """`what` and the resources that it sees, ``transport/device`` each; its wheels are built without RDMA."""
    text = f"{what}; sees {', '.join(names)}"
    if not any(name.startswith(("tcp/", "self/")) for name in names):
        return fail("ucx", text, "unset UCX_TLS UCX_NET_DEVICES")
    if any(_RDMA.match(name) for name in names):
        return ok("ucx", text)
    if not rdma_devices:
        return ok("ucx", f"{text}; no RDMA device, hosts would talk over TCP")
    text += f"; none of the RDMA devices {', '.join(rdma_devices)}, hosts would talk over TCP"
    fix = "transport.name: nixl; or a UCX with verbs, RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true (docs/operations.md, RDMA)"
    return warn("ucx", text, fix)


def parse_ucx_resources(info: str) -> list[str]:
    """``transport/device`` of each resource in UCX's description of a context, in its order."""
    return re.findall(r"resource\s+\d+\s*:.*?\bflags\s+\S+\s+(\S+)", info)


def check_shared_memory(total_bytes: int, free_bytes: int) -> Finding:
    text = f"/dev/shm has {total_bytes / 2**20:,.0f} MiB, {free_bytes / 2**20:,.0f} MiB of it free"
    if free_bytes >= MIN_SHM_BYTES:
        return ok("shared memory", text)
    fix = "mount -o remount,size=2g /dev/shm (a container: docker run --shm-size=2g)"
    return warn("shared memory", text, fix)


def _shared_memory() -> tuple[int, int]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return 0, 0
    return usage.total, usage.free


def check_ptrace_scope(scope: str | None) -> Finding:
    """Cross-memory attach, which makes transfers on one host as fast as memcpy, is ptrace to the kernel."""
    name = "cross-memory attach"
    if scope is None:
        return ok(name, "permitted (the kernel has no yama)")
    if scope == "0":
        return ok(name, "permitted (kernel.yama.ptrace_scope is 0)")
    text = f"kernel.yama.ptrace_scope is {scope}: ranks that are not parent and child use TCP on one host"
    return warn(name, text, "sysctl -w kernel.yama.ptrace_scope=0")


def check_memlock(limit_bytes: int, *, has_rdma: bool) -> Finding:
    is_unlimited = limit_bytes == resource.RLIM_INFINITY
    text = "unlimited" if is_unlimited else f"{limit_bytes / 2**20:,.0f} MiB"
    if is_unlimited or not has_rdma:
        note = "" if is_unlimited else ", enough without RDMA"
        return ok("locked memory", text + note)
    text += "; RDMA pins every ring and staging buffer"
    return warn("locked memory", text, "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)")


def check_open_files(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES:
        return ok("open files", "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}")
    text = f"{limit:,}, with which a decode rank takes {most_sessions(limit)} prefill ranks instead of {MAX_SESSIONS}"
    return warn("open files", text, f"ulimit -n {MIN_OPEN_FILES}")


def check_gpu(has_gpu: bool, torch_version: str | None) -> Finding:
    is_cpu_torch = torch_version is not None and torch_version.endswith("+cpu")
    if not has_gpu:
        return ok("gpu", "none; everything runs on the CPU")
    if is_cpu_torch:
        text = f"there is one, but torch {torch_version} cannot use it"
        return warn("gpu", text, "install torch's CUDA build: make clean setup")
    return ok("gpu", f"yes, torch {torch_version or 'MISSING'}")


def transports_here(version_of: Callable[[str], str | None], *, has_gpu: bool) -> tuple[str, ...]:
    """What can be tried: `ucx` always, for it is needed, `nixl` where it is installed, `cuda_ipc` where there is a GPU too."""
    has_nixl = version_of("nixl-cu13") or version_of("nixl-cu12")
    has_cuda_ipc = has_gpu and version_of("cuda-bindings")
    return ("ucx", *(("nixl",) if has_nixl else ()), *(("cuda_ipc",) if has_cuda_ipc else ()))


def check_transfer(transport: str, measure: Callable[[str], LoopbackResult]) -> Finding:
    """A transfer between two processes, which is what everything else is for."""
    name = f"transfer over {transport}"
    try:
        result = measure(transport)
    except TransferError as error:
        return fail(name, str(error), "see the lines above; UCX_LOG_LEVEL=info tells more")
    text = f"{result.bandwidth_bytes_per_s / 1e9:.2f} GB/s, {result.latency_s * 1e6:,.0f} us, lane {result.lane}, bytes equal"
    if result.bandwidth_bytes_per_s < SLOW_BYTES_PER_S:
        fix = "run it again on an idle machine; if the lane ends with /net, permit cross-memory attach"
        return warn(name, text, fix)
    return ok(name, text)
