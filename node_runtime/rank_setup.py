"""What a rank of either role opens and says of itself when it starts."""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import transfer
from planner.node_plan import check_fits
from transfer.config import EMBEDDED_ENGINE, NodeConfig, TransportConfig
from transfer.errors import ConfigError
from transfer.instance import CAPABILITIES, Instance
from transfer.layout import KVLayout, Shard
from transfer.messages import PROTOCOL_VERSIONS
from transfer.storage.open import check_store
from transfer.transport.base import Transport

_LIBRARIES: Final = {
    "ucx": (("ucxx",), "'kvferry[ucx-cu13]' (or ucx-cu12)"),
    "nixl": (("nixl_cu13", "nixl_cu12"), "'kvferry[nixl]' (or nixl-cu12)"),
    "cuda_ipc": (("cuda.bindings",), "'kvferry[cuda-ipc]'"),
}
"""Transport -> modules of which it needs one, and what brings them."""


class Engine(Protocol):
    """What an instance is known by, of either role's engine."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def shard(self) -> Shard: ...

    @property
    def model_fields(self) -> Mapping[str, str]: ...


def check_before_start(config: NodeConfig) -> None:
    """What can be refused before any rank is started, which takes seconds.

    Raises:
        ConfigError: The model directory is none, does not fit the parallel degree, or the transport, the store, discovery or
            the engine cannot be had.
        MemoryPlanError: The model does not fit the memory.
    """
    if not os.path.isfile(config.model / "config.json"):  # Path.is_file raises OSError for a name that is too long
        what = "it has no config.json" if os.path.isdir(config.model) else "there is no such directory"
        raise ConfigError(f"model is {config.model}; {what}: it must be a Hugging Face model directory")
    if config.role == "decode" and not (config.model / "tokenizer.json").is_file():
        raise ConfigError(f"model is {config.model}; it has no tokenizer.json, which a decode node needs to give text")
    if config.device == "cuda" and not any(Path("/dev").glob("nvidia[0-9]*")):
        raise ConfigError("device is cuda, and this machine has no NVIDIA device (/dev/nvidia*): choose cpu")
    _check_transport(config)
    check_store(config.storage)
    if config.discovery.kind == "etcd" and importlib.util.find_spec("aetcd") is None:
        raise ConfigError("discovery.kind is etcd, and aetcd is not installed: pip install 'kvferry[etcd]'")
    if config.engine == EMBEDDED_ENGINE:
        embedded: Any = importlib.import_module("embedded_engine.model_config")
        embedded.check_before_start(config.model, config.parallel.tp_size, dummy_weights=config.dummy_weights)
        check_fits(config)
    else:
        engine_loader(config)


def _check_transport(config: NodeConfig) -> None:
    name = config.transport.name
    if name == "inproc":
        raise ConfigError(
            "transport.name is inproc, which joins two ends of one process; ranks are processes of their own: choose ucx"
        )
    if name == "cuda_ipc" and config.device != "cuda":
        raise ConfigError(f"transport.name is cuda_ipc, which joins GPUs, and device is {config.device}: choose ucx or nixl")
    modules, extras = _LIBRARIES[name]
    if not any(map(_is_installed, modules)):
        raise ConfigError(f"transport.name is {name}, and {' or '.join(modules)} is not installed: pip install {extras}")


def _is_installed(module: str) -> bool:
    """Whether it can be imported; also of one in a package that several distributions share, as `cuda` is."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of what it is in
        return False


def engine_loader(config: NodeConfig) -> Callable[..., Any]:
    """What the setting `engine` names: called with the settings, `rank=` and `rendezvous=`, it returns the rank's engine.

    Raises:
        ConfigError: There is no such module or function.
    """
    module, _, function = config.engine.partition(":")
    try:
        loader: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine is {config.engine}, which cannot be imported: {error}") from error
    return loader


def open_transport(config: TransportConfig, *, host: str, device_index: int | None = None) -> Transport:
    """The configured data plane.

    Args:
        device_index: The GPU on which the rank's pool lies; None: in host memory.
        host: What the node's ports bind. Where it is a loopback address, UCX opens its own ports on the loopback device only
            (else on every device); UCX_NET_DEVICES in the environment is stronger.

    Raises:
        ConfigError: It cannot be had on this machine, or not between processes.
    """
    options = {"NET_DEVICES": "lo"} if is_loopback(host) and "UCX_NET_DEVICES" not in os.environ else None
    match config.name:
        case "ucx":
            from transfer.transport.ucx import UcxTransport  # loads a foreign library only where it is used

            return UcxTransport(lane=config.ucx.lane, options=options)
        case "nixl":
            from transfer.transport.nixl import NixlTransport

            return NixlTransport(lane=config.nixl.lane, backend=config.nixl.backend, options=options)
        case "cuda_ipc":
            from transfer.transport.cuda_ipc import CudaIpcTransport

            assert device_index is not None  # `check_before_start` has seen to it
            return CudaIpcTransport(mode=config.cuda_ipc.mode, device_index=device_index)
        case _:
            raise ConfigError(f"transport.name is {config.name}, which joins two ends of one process; a rank needs another")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is only reachable from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_instance(engine: Engine, transport: Transport, *, incarnation: int, device_type: str) -> Instance:
    """This rank's instance, as it tells its peers; its pool is on a device of that type."""
    # Loads torch, for which a command line with wrong settings does not wait.
    from transfer.copy.digest import digests_for

    return Instance(
        incarnation=incarnation,
        layout=engine.layout,
        shard=engine.shard,
        model_fields=engine.model_fields,
        transport=transport.name,
        digests=digests_for(device_type),
        protocol_versions=PROTOCOL_VERSIONS,
        capabilities=CAPABILITIES,
        version=transfer.__version__,
        kv_scales=tuple((float(k), float(v)) for k, v in getattr(engine, "kv_scales", ())),
    )
