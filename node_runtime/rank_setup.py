"""Check a node's settings before its ranks start, and open the transport and the tracer of a rank."""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import transfer
from node_runtime.engine import InstanceEngine, engine_loader
from planner.device_defaults import AnyNode, visible_gpu_bytes, with_gpu_defaults
from planner.model_directory import download_hint, read_model_directory
from planner.node_plan import check_fits
from transfer.config import EMBEDDED_ENGINE, DecodeNodeConfig, NodeConfig, TracingConfig, TransportConfig
from transfer.errors import ConfigError, TransferError
from transfer.instance import CAPABILITIES, Instance
from transfer.layout import DType
from transfer.messages import PROTOCOL_VERSIONS
from transfer.storage.open import check_store
from transfer.tracing import Tracer
from transfer.transport.base import Transport

if TYPE_CHECKING:  # leaders load no torch
    from transfer.copy.kernel_choice import Kernels
    from transfer.transport.sessions import PeerTransport

_LIBRARIES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "shm": ((), ""),
    "ucx": (("ucxx",), "'kvferry[ucx-cu13]' (or ucx-cu12)"),
    "nixl": (("nixl_cu13", "nixl_cu12"), "'kvferry[nixl]' (or nixl-cu12)"),
    "cuda_ipc": (("cuda.bindings",), "'kvferry[cuda-ipc]'"),
}
"""Transport -> modules, of which it needs one, and the extras that install them. `shm` needs none."""


def check_before_start(config: AnyNode) -> AnyNode:
    """Reject settings with which no rank could start, because starting ranks takes seconds.

    Return the settings with the defaults of the ranks' device, where nothing is set.

    Raises:
        ConfigError: The model directory is invalid or does not fit the parallel degree, or the transport, the store, discovery or
            the engine is not available.
        MemoryPlanError: The model does not fit the memory.
    """
    if not os.path.isfile(config.model / "config.json"):  # Path.is_file raises OSError for a name that is too long
        what = "it has no config.json" if os.path.isdir(config.model) else "there is no such directory"
        raise ConfigError(
            f"model is {config.model}; {what}: it must be a Hugging Face model directory{download_hint(config.model)}"
        )
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
        embedded.check_before_start(
            config.model,
            config.parallel.tp_size,
            dummy_weights=config.dummy_weights,
            is_speculative=isinstance(config, DecodeNodeConfig) and config.speculative.is_on,
            draft_model=config.draft_model,
        )
        config = _with_device_defaults(config)
        check_fits(config)
        return config
    engine_loader(config)
    return _with_device_defaults(config)


def _with_device_defaults(config: AnyNode) -> AnyNode:
    if config.device != "cuda":
        return config
    size = config.memory.device_memory or visible_gpu_bytes(config.first_device)
    if not size:
        return config  # the ranks report what is wrong with the GPU
    layout = None
    if config.engine == EMBEDDED_ENGINE:
        shape = read_model_directory(config.model, draft=config.draft_model).shape
        layout = shape.layout(DType(config.dtype) if config.dtype else shape.dtype or DType.BFLOAT16)
    return with_gpu_defaults(config, layout, device_bytes=size)


def _check_transport(config: NodeConfig) -> None:
    name = config.transport.name
    if name == "inproc":
        raise ConfigError(
            "transport.name is inproc, which joins two ends of one process; ranks are processes of their own: choose ucx"
        )
    if name == "cuda_ipc" and config.device != "cuda":
        raise ConfigError(f"transport.name is cuda_ipc, which joins GPUs, and device is {config.device}: choose ucx or nixl")
    if name == "shm" and config.device != "cpu":
        raise ConfigError(f"transport.name is shm, which joins pools in host memory, and device is {config.device}: choose auto")
    if name == "auto":
        usable = [name for name in _LIBRARIES if name != "shm" and (name != "cuda_ipc" or config.device == "cuda")]
        # Peers of a node that binds a loopback address are on this machine, where shm needs no library.
        is_shm_enough = config.device == "cpu" and is_loopback(config.server.host)
        if not is_shm_enough and not any(_has_library(name) for name in usable):
            raise ConfigError(
                "transport.name is auto, and no transport is installed: pip install "
                + " or ".join(_LIBRARIES[name][1] for name in usable)
            )
        return
    modules, extras = _LIBRARIES[name]
    if not _has_library(name):
        raise ConfigError(f"transport.name is {name}, and {' or '.join(modules)} is not installed: pip install {extras}")


def _has_library(transport: str) -> bool:
    modules = _LIBRARIES[transport][0]
    return not modules or any(map(_is_installed, modules))


def _is_installed(module: str) -> bool:
    """Return whether a module can be imported. Its package may belong to several distributions, as `cuda` does."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package of the module is missing
        return False


def open_transport(
    config: TransportConfig, *, host: str, device_index: int | None = None, kernels: Kernels | None = None
) -> Transport:
    """Open the configured data plane.

    Args:
        kernels: Implementation of the rank's copies. Plain torch does not store into a peer's memory, so ``cuda_ipc`` copies.
        device_index: The GPU of the rank's pool. None means that the pool is in host memory.
        host: Address that the node's ports bind. If it is a loopback address, UCX opens its ports on the loopback device only;
            UCX_NET_DEVICES in the environment has precedence.

    Raises:
        ConfigError: The transport is not available on this machine, or not between processes.
    """
    if kernels == "torch":
        config = config.model_copy(update={"cuda_ipc": config.cuda_ipc.model_copy(update={"mode": "copy"})})
    options = {"NET_DEVICES": "lo"} if is_loopback(host) and "UCX_NET_DEVICES" not in os.environ else None
    if config.name == "auto":
        return _open_auto(config, options, device_index)
    return _open_one(config.name, config, options, device_index)


def _open_one(
    name: str, config: TransportConfig, options: Mapping[str, str] | None, device_index: int | None
) -> PeerTransport[Any, Any]:
    match name:
        case "ucx":
            from transfer.transport.ucx import UcxTransport  # loads a foreign library only where it is used

            return UcxTransport(lane=config.ucx.lane, options=options)
        case "nixl":
            from transfer.transport.nixl import NixlTransport

            return NixlTransport(lane=config.nixl.lane, backend=config.nixl.backend, options=options)
        case "shm":
            from transfer.transport.shm import ShmTransport

            if device_index is not None:
                raise ConfigError("transport shm joins pools in host memory, and the pool is on a GPU: choose auto")
            return ShmTransport()
        case "cuda_ipc":
            from transfer.transport.cuda_ipc import CudaIpcTransport

            if device_index is None:
                raise ConfigError("transport cuda_ipc joins GPUs, and the pool is in host memory: choose ucx or nixl")
            return CudaIpcTransport(mode=config.cuda_ipc.mode, device_index=device_index)
        case _:
            raise ConfigError(f"transport.name is {name}, which joins two ends of one process; a rank needs another")


def _open_auto(config: TransportConfig, options: Mapping[str, str] | None, device_index: int | None) -> Transport:
    """Open every transport that this rank can use."""
    from transfer.transport.auto import AutoTransport  # loads numpy, which leaders do not need
    from transfer.transport.nixl_library import has_only_tcp

    net_devices = (options or {}).get("NET_DEVICES") or os.environ.get("UCX_NET_DEVICES") or "all"
    has_rdma = not has_only_tcp(os.environ.get("UCX_TLS") or "all", net_devices)
    lanes = {"ucx": config.ucx.lane, "nixl": config.nixl.lane}
    members: dict[str, PeerTransport[Any, Any]] = {}
    unusable: dict[str, str] = {}
    for name in ("shm" if device_index is None else "cuda_ipc", "ucx", "nixl"):
        modules, extras = _LIBRARIES[name]
        if not _has_library(name):
            unusable[name] = f"{' or '.join(modules)} is not installed: pip install {extras}"
        elif "shm" in lanes.values() and lanes.get(name, "shm") != "shm":
            unusable[name] = f"transport.{name}.lane is {lanes[name]}, and shm of the other transport asks for shared memory"
        elif name == "cuda_ipc" and set(lanes.values()) == {"net"}:
            unusable[name] = "transport.ucx.lane and transport.nixl.lane are net, so ranks of one host use the network, too"
        elif name == "shm" and "net" in lanes.values():
            unusable[name] = "transport.ucx.lane or transport.nixl.lane is net, so ranks of one host use the network, too"
        elif name == "nixl" and device_index is None and not has_rdma and "ucx" in members:
            unusable[name] = "this host has no RDMA device, and ucx is faster without one"  # an agent takes 0.4 s to open
        else:
            try:
                members[name] = _open_one(name, config, options, device_index)
                if device_index is not None:
                    members[name].check_devices()
            except TransferError as error:
                unusable[name] = str(error)
                if name in members:
                    members.pop(name).close()
    return AutoTransport(members, is_device=device_index is not None, has_rdma=has_rdma, unusable=unusable)


def open_tracer(config: TracingConfig, *, role: str, rank: int | None = None) -> Tracer | None:
    """Return the tracer of a leader or a rank. None means that tracing is off; OpenTelemetry is then not loaded.

    Raises:
        ConfigError: OpenTelemetry is not installed, or a setting of the tracer cannot be used.
    """
    if config.endpoint is None:
        return None
    try:
        from node_runtime.tracing_client import OtelTracer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError(f"tracing.endpoint is {config.endpoint}; it needs OpenTelemetry: install kvferry[otel]") from error
    return OtelTracer(config, role=role, rank=rank)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_instance(engine: InstanceEngine, transport: Transport, *, incarnation: int, device_type: str) -> Instance:
    """Return the description of this rank's instance for peers. Its pool is on a device of type `device_type`."""
    from transfer.copy.digest import digests_for  # imported late: it loads torch, which invalid settings do not need

    return Instance(
        incarnation=incarnation,
        layout=engine.layout,
        shard=engine.shard,
        model_fields=engine.model_fields,
        transport=transport.name,
        transports=transport.names if len(transport.names) > 1 else (),
        digests=digests_for(device_type),
        protocol_versions=PROTOCOL_VERSIONS,
        capabilities=CAPABILITIES,
        version=transfer.__version__,
        kv_scales=tuple((float(k), float(v)) for k, v in getattr(engine, "kv_scales", ())),
        attention=getattr(engine, "attention", ""),
    )
