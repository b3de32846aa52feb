"""Checks of the machine itself: packages, limits of the kernel, ports on loopback, UCX, and the clock."""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import kvferry
import transfer
from kvferry.doctor.finding import Finding, fail, ok, read_line, warn
from transfer.registry.options import MAX_SESSIONS, files_for, most_sessions

MIN_SHM_BYTES: Final = 256 << 20
"""Enough for Triton, torch and the queues of UCX. NCCL is known to need more than a container's default of 64 MiB."""
MIN_OPEN_FILES: Final = files_for(MAX_SESSIONS)
"""For the most sessions that a decode rank accepts."""
MAX_CLOCK_ERROR_S: Final = 2.0
"""The kernel adds 0.5 ms for each second since the clock was last set (kernel/time/ntp.c, MAXFREQ). timesyncd lets up to 2,048 s
pass (PollIntervalMaxSec) and chrony 1,024 s, so the error of a synchronised clock reaches 1.1 s."""
MAX_CLOCK_OFFSET_S: Final = 0.1
"""With a larger offset, the logs of two machines show events in a wrong order: a transfer takes less time."""
NEEDED: Final = ("torch", "transformers", "triton", "grpcio", "pyzmq", "numpy", "msgpack", "xxhash")
_RDMA: Final = re.compile(r"\b(?:rc|ud|dc|mlx5|rdmacm|srd|efa|gga)[a-z_0-9]*/")
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?>=([0-9!.]+)(?:;.*)?")
_PIN: Final = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")
_SHOWN_PACKAGES: Final = 8
_UNSYNCHRONISED: Final = 0x0040  # STA_UNSYNC
_NANOSECONDS: Final = 0x2000  # STA_NANO: `offset` is in ns, not in us
_CLOCK_ERROR: Final = 5  # TIME_ERROR
_FIX_CLOCK: Final = "timedatectl set-ntp true (or systemctl enable --now chrony); a container has its host's clock, fix it there"


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, without importing it; None means not installed."""
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
    versions = {name: version_of(name) for name in NEEDED}
    missing = [name for name, version in versions.items() if version is None]
    text = ", ".join(f"{name} {version or 'MISSING'}" for name, version in versions.items())
    if missing:
        return fail("packages", text, f"pip install -c constraints.txt {' '.join(missing)}")
    return ok("packages", text)


def check_compiled_copies(is_built: bool) -> Finding:
    """Warn if the installation lacks the compiled copies of KV in host memory."""
    name = "copies in host memory"
    if is_built:
        return ok(name, "compiled code")
    fix = "install gcc and Python's headers (Debian: apt-get install gcc python3-dev), then make setup or pip install ."
    return warn(name, "NumPy, which is slower: the compiled code was not built when kvferry was installed", fix)


def has_compiled_copies() -> bool:
    """Return whether the extension module is there, without an import of torch."""
    return any((Path(transfer.__file__).parent / "copy").glob("_host_copy*.so"))


def required_versions() -> dict[str, str]:
    """Return the oldest version of each package that kvferry requires without extras; empty if kvferry is not installed."""
    try:
        requirements = metadata.requires("kvferry") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (_REQUIREMENT.fullmatch(one.replace(" ", "")) for one in requirements if "extra==" not in one.replace(" ", ""))
    return {_name(match[1]): match[2] for match in found if match}


def pinned_versions() -> dict[str, str]:
    """Return the versions that were tested together (constraints.txt); empty if kvferry runs without its source tree."""
    text = read_line(Path(kvferry.__file__).parents[1] / "constraints.txt") or ""
    found = (_PIN.fullmatch(line.strip()) for line in text.splitlines())
    return {_name(match[1]): match[2] for match in found if match}


def check_versions(version_of: Callable[[str], str | None], required: Mapping[str, str], tested: Mapping[str, str]) -> Finding:
    """Fail if a package is too old, and warn if it is another version than the tested one.

    Args:
        version_of: Returns the installed version; None means not installed, which `check_packages` reports.
        required: Oldest versions.
        tested: Versions of constraints.txt.
    """
    here = {name: version for name in {*required, *tested} if (version := version_of(name)) is not None}
    old = sorted(name for name in required if name in here and _numbers(here[name]) < _numbers(required[name]))
    if old:
        text = ", ".join(f"{name} {here[name]} is older than {required[name]}" for name in old)
        return fail("versions", text, f"pip install -c constraints.txt --upgrade {' '.join(old)}")
    if not tested:
        return ok("versions", "none is older than kvferry asks for (no constraints.txt here to tell which were tested)")
    # "2.13.0+cpu" is 2.13.0 of another index: a pin without such a suffix takes both.
    others = sorted(name for name in tested if name in here and here[name].partition("+")[0] != tested[name].partition("+")[0])
    if not others:
        return ok("versions", f"{sum(name in tested for name in here)} packages, all as tested together (constraints.txt)")
    shown = ", ".join(f"{name} {here[name]} (tested: {tested[name]})" for name in others[:_SHOWN_PACKAGES])
    more = f" and {len(others) - _SHOWN_PACKAGES} more" if len(others) > _SHOWN_PACKAGES else ""
    return warn("versions", f"not as tested together: {shown}{more}", f"pip install -c constraints.txt {' '.join(others)}")


def _name(written: str) -> str:
    """Return the normalised name of a package."""
    return re.sub(r"[-_.]+", "-", written).lower()


def _numbers(version: str) -> tuple[int, ...]:
    """Return the epoch and the release part as numbers: (0, 2, 13, 0) for "2.13.0rc1+cpu"."""
    epoch, mark, rest = version.rpartition("!")
    release = re.match(r"\d+(?:\.\d+)*", rest)
    return (int(epoch) if mark else 0, *map(int, release[0].split("."))) if release else ()


def ucx_devices(rdma_devices: Sequence[str]) -> Finding:
    """Check UCX and UCXX: their versions, and the devices that UCX finds, against the `rdma_devices` of the kernel."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        lib: Any = importlib.import_module("ucxx._lib.libucxx")
        context = lib.UCXContext({}, (lib.Feature.TAG, lib.Feature.WAKEUP))
        names = parse_ucx_resources(str(context.info))
        version = ".".join(map(str, lib.get_ucx_version()))
    except ModuleNotFoundError:
        text = "not installed; nodes of other machines need it, or nixl"
        return warn("ucx", text, "pip install 'kvferry[ucx-cu13]' (or ucx-cu12; no GPU needed)")
    except Exception as error:  # a missing shared library, or UCX's own refusal
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return fail("ucx", text, "pip install 'kvferry[ucx-cu13]' (or ucx-cu12; no GPU needed)")
    wrapper = installed_version("ucxx-cu13") or installed_version("ucxx-cu12") or "of unknown version"
    return check_ucx(f"UCX {version}, ucxx {wrapper}", names, rdma_devices)


def check_ucx(what: str, names: Sequence[str], rdma_devices: Sequence[str]) -> Finding:
    """Check the resources of UCX, each ``transport/device``; its wheels are built without RDMA."""
    text = f"{what}; sees {', '.join(names)}"
    if not any(name.startswith(("tcp/", "self/")) for name in names):
        return fail("ucx", text, "unset UCX_TLS UCX_NET_DEVICES")
    if any(_RDMA.match(name) for name in names):
        return ok("ucx", text)
    if not rdma_devices:
        return ok("ucx", f"{text}; no RDMA device, hosts would talk over TCP")
    text += f"; none of the RDMA devices {', '.join(rdma_devices)}, hosts would talk over TCP"
    fix = "transport.name: nixl; or a UCX with verbs, RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true (docs/network.md, RDMA)"
    return warn("ucx", text, fix)


def parse_ucx_resources(info: str) -> list[str]:
    """Return ``transport/device`` of each resource in UCX's description of a context."""
    return re.findall(r"resource\s+\d+\s*:.*?\bflags\s+\S+\s+(\S+)", info)


def check_shared_memory(total_bytes: int, free_bytes: int) -> Finding:
    text = f"/dev/shm has {total_bytes / 2**20:,.0f} MiB, {free_bytes / 2**20:,.0f} MiB of it free"
    if free_bytes >= MIN_SHM_BYTES:
        return ok("shared memory", text)
    fix = "mount -o remount,size=2g /dev/shm (a container: docker run --shm-size=2g)"
    return warn("shared memory", text, fix)


def shared_memory() -> tuple[int, int]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return 0, 0
    return usage.total, usage.free


def check_ptrace_scope(scope: str | None) -> Finding:
    """Check cross-memory attach, which makes transfers on one host as fast as memcpy. The kernel treats it as ptrace."""
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


def check_ports() -> Finding:
    """Check that a free port on loopback can be bound and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2.0):
                pass
    except OSError as error:
        return fail("loopback ports", str(error), "ip link set lo up")
    span = read_line(Path("/proc/sys/net/ipv4/ip_local_port_range")) or ""
    text = f"a free one can be had and reached (of {' to '.join(span.split())})"
    return ok("loopback ports", f"{text}; whether those of a node can be had, --node-config FILE tells")


class _Timex(ctypes.Structure):
    """struct timex of the kernel, with room for further fields."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    """State of the kernel's clock: its remaining correction, and the bound of its error as its time service set it."""

    is_synchronised: bool
    offset_s: float
    max_error_s: float


def read_clock() -> ClockState | str:
    """Read the state of the clock from the kernel; return the reason if that is not possible."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (AttributeError, OSError):
        return "this C library has no adjtimex"
    timex = _Timex()  # modes 0: only to be read
    state = adjtimex(ctypes.byref(timex))
    if state < 0:
        number = ctypes.get_errno()
        return f"adjtimex: {os.strerror(number)}" + (" (a container that forbids it)" if number == errno.EPERM else "")
    per_second = 1e9 if timex.status & _NANOSECONDS else 1e6
    return ClockState(
        is_synchronised=state != _CLOCK_ERROR and not timex.status & _UNSYNCHRONISED,
        offset_s=timex.offset / per_second,
        max_error_s=timex.maxerror / 1e6,
    )


def check_clock(found: ClockState | str) -> Finding:
    """Check the clock. Certificates, logs and traces of two machines need it; the protocol does not."""
    name = "clock"
    if isinstance(found, str):
        return warn(name, f"not known: {found}", "timedatectl timesync-status (or chronyc tracking), on the host")
    if not found.is_synchronised:
        return warn(name, "the clock is unsynchronised: no service sets it", _FIX_CLOCK)
    text = f"synchronised, being moved by {found.offset_s * 1e3:+.3f} ms, at most {found.max_error_s * 1e3:,.0f} ms wrong"
    if found.max_error_s > MAX_CLOCK_ERROR_S:
        fix = "chronyc sources -v (or timedatectl timesync-status): is its time server still reached?"
        return warn(name, f"{text}: it has not been set for long", fix)
    if abs(found.offset_s) > MAX_CLOCK_OFFSET_S:
        fix = "wait until it is there (chronyc tracking, or timedatectl timesync-status); times of logs and traces jump"
        return warn(name, text, fix)
    return ok(name, text)
