"""Access to NIXL and its workarounds: import, one agent per session, UCX's options.

The bindings are used without NIXL's Python wrapper. The wrapper sets the delay of the progress thread to zero, so the thread
polls without a pause (seen: a whole core for each agent). It also logs to standard output.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from transfer.errors import ConfigError, PeerUnreachable
from transfer.transport.registered_memory import HostMemory, Memory
from transfer.transport.ucx_library import in_words

UCX_BACKEND = "UCX"
_PACKAGES = {"13": "nixl_cu13", "12": "nixl_cu12"}
# A target's progress thread handles TCP and new connections while its owner's loop is idle. It sleeps on UCX's descriptor. It
# also wakes up once in this time, in case an event was missed: a few microseconds, 10 times a second.
_PROGRESS_DELAY_US = 100_000
# NIXL includes its own UCX, beside that of the ucx transport. Each UCX hooks mmap, munmap and similar calls to detect memory that
# goes away, and the second one silently unhooks the first. Then the first one's registration cache goes stale, its next context
# gets none, and without one UCX 1.21 dies when a peer leaves (see `ucx`). NIXL's memory is registered explicitly and needs no
# cache. So its UCX must hook nothing; it reads that once, when the plugin is loaded.
_NO_HOOKS = {"UCX_MEM_EVENTS": "n", "UCX_RCACHE_ENABLE": "n"}

# UCX's module for Amazon's EFA loads the system's libefa if it is installed (any host with Debian's ibverbs-providers). That
# loads the system's libibverbs and libnl, although the process has those of NIXL's wheel. Two libnl-route use each other's
# functions, and the process dies of SIGSEGV when it exits (NIXL 1.5.1; rtnl_tc_unregister under _dl_fini).
_WITHOUT_EFA = "^efa"


def load_nixl() -> ModuleType:
    """Import NIXL's bindings. If those of both CUDA majors are installed, take the major of this process's torch.

    Raises:
        ConfigError: NIXL is not installed.
    """
    torch = sys.modules.get("torch")
    cuda = str(getattr(getattr(torch, "version", None), "cuda", None) or "13").partition(".")[0]
    wanted = _PACKAGES.get(cuda, _PACKAGES["13"])
    failures = []
    for package in sorted(_PACKAGES.values(), key=lambda name: name != wanted):
        try:
            return importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            failures.append(str(error))
    raise ConfigError(
        f"transport nixl needs NIXL ({'; '.join(failures)}): pip install 'kvferry[nixl]' (or kvferry[nixl-cu12] for CUDA 12; "
        "both work without a GPU)"
    )


def version_of(lib: ModuleType) -> str:
    """Return NIXL's version, for messages."""
    return importlib.metadata.version(lib.__name__.partition(".")[0])


def has_only_tcp(tls: str, net_devices: str = "all") -> bool:
    """Return whether UCX reaches other hosts over TCP only: no RDMA device that this process may open, or none allowed.

    Args:
        tls, net_devices: Values of ``UCX_TLS`` and ``UCX_NET_DEVICES``.
    """
    devices = {device.name for device in RDMA_DEVICES.glob("*")}
    if not devices or not any(os.access(path, os.R_OK | os.W_OK) for path in RDMA_VERBS.glob("uverbs*")):
        return True  # a container can see the host's devices in /sys and have none of its own
    named = {name.partition(":")[0] for name in net_devices.split(",")}
    if "all" not in named and not named & devices:
        return True
    names = tls.split(",")
    return not tls.startswith("^") and not any(name == "all" or name.startswith(_RDMA_TRANSPORTS) for name in names)


RDMA_DEVICES = Path("/sys/class/infiniband")
RDMA_VERBS = Path("/dev/infiniband")
_RDMA_TRANSPORTS = ("ib", "rc", "dc", "ud", "srd", "gga")


def _modules() -> dict[str, str]:
    """Return the variable that keeps UCX from loading its EFA module without an EFA device. The environment has precedence."""
    drivers = [(device / "device" / "driver").resolve().name for device in RDMA_DEVICES.glob("*")]
    return {} if "UCX_MODULES" in os.environ or "efa" in drivers else {"UCX_MODULES": _WITHOUT_EFA}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables while an agent's backend is made: NIXL has no other way for values that hold a comma."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Agent:
    """One NIXL agent with one backend. Each session has its own, so that closing it ends everything of the session.

    Args:
        lib: Result of `load_nixl`.
        backend: The NIXL plugin that moves the bytes.
        options: UCX options without their ``UCX_`` prefix; none for other backends.
        is_target: Start NIXL's progress thread. A writer needs none, because it polls its writes itself. The thread is not safe
            beside copies on a GPU, which only a writer starts (docs/adr/0041-nixl-progress-thread.md).

    Raises:
        ConfigError: The plugin is missing or cannot be set up here.
    """

    def __init__(self, lib: ModuleType, backend: str, options: Mapping[str, str], *, is_target: bool) -> None:
        self._lib = lib
        config = lib.nixlAgentConfig()
        config.useProgThread = is_target
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = lib.NIXL_THREAD_SYNC_NONE  # one owner thread; NIXL locks against its own progress thread
        self._peer: Any = None
        with _environment({f"UCX_{name}": value for name, value in options.items()} | _NO_HOOKS | _modules()):
            self._agent = lib.nixlAgent(f"kvferry-{secrets.token_hex(8)}", config)
            plugins = self._agent.getAvailPlugins()
            if backend not in plugins:
                raise ConfigError(
                    f"backend {backend} of transport nixl is not installed; this NIXL has {', '.join(sorted(plugins))}"
                )
            try:
                self._backend = self._agent.createBackend(backend, {})
            except Exception as error:
                raise ConfigError(f"backend {backend} of transport nixl refused the options {dict(options)}: {error}") from error

    def register(self, memory: Memory, address: int) -> None:
        """Make `memory` known under `address`.

        Raises:
            ConfigError: The backend cannot register it.
        """
        try:
            self._agent.registerMem(self._described(memory, address), [self._backend])
        except Exception as error:
            where = f"device {device_of(memory)}" if memory.is_device else "the host"
            raise ConfigError(f"NIXL cannot register {memory.num_bytes} bytes on {where}: {in_words(error)}") from error

    def deregister(self, memory: Memory, address: int) -> None:
        """Undo `register`."""
        self._agent.deregisterMem(self._described(memory, address), [self._backend])

    def metadata(self) -> bytes:
        """Return the bytes that a peer needs to reach this agent and its memory."""
        return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes) -> None:
        """Connect to the agent whose `metadata` this is.

        Raises:
            PeerUnreachable: NIXL cannot use it, or cannot reach its address.
        """
        try:
            self._peer = self._agent.loadRemoteMD(metadata)
            self._agent.makeConnection(self._peer, [self._backend])
        except Exception as error:
            raise PeerUnreachable(f"NIXL cannot reach the peer's agent: {in_words(error)}") from error

    def start(
        self, source: tuple[int, int, int], target: tuple[int, int, int], *, source_on_device: bool, target_on_device: bool
    ) -> Any:
        """Post one write of (address, bytes, device) to (address, bytes, device).

        Returns:
            The pending request; None if the write is complete already.
        """
        request = self._agent.createXferReq(
            self._lib.NIXL_WRITE,
            self._lib.nixlXferDList(self._kind(source_on_device), [source]),
            self._lib.nixlXferDList(self._kind(target_on_device), [target]),
            self._peer,
            b"",
            [self._backend],
        )
        try:
            status = self._agent.postXferReq(request, b"")
        except Exception:
            self.release(request)
            raise
        if status == self._lib.NIXL_IN_PROG:
            return request
        self.release(request)
        return None

    def is_done(self, request: Any) -> bool:
        """Return whether a pending request is complete. Raise NIXL's exception if it failed."""
        return bool(self._agent.getXferStatus(request) != self._lib.NIXL_IN_PROG)

    def release(self, request: Any) -> None:
        """Release a request. NIXL cancels it if it can; otherwise it ends with the agent."""
        with contextlib.suppress(Exception):
            self._agent.releaseXferReq(request)

    def close(self) -> None:
        """Destroy the agent: its worker with all pending writes, its connections, its registrations."""
        self._agent = self._backend = None

    def _described(self, memory: Memory, address: int) -> Any:
        return self._lib.nixlRegDList(self._kind(memory.is_device), [(address, memory.num_bytes, device_of(memory), "")])

    def _kind(self, is_device: bool) -> Any:
        return self._lib.VRAM_SEG if is_device else self._lib.DRAM_SEG


def address_of(memory: Memory) -> int:
    """Return the address of the first byte."""
    return int(memory.view.ctypes.data) if isinstance(memory, HostMemory) else memory.address


def device_of(memory: Memory) -> int:
    """Return the device of a memory; 0 for the host, as NIXL expects it."""
    return 0 if isinstance(memory, HostMemory) else memory.device_index
