"""Every setting of the two daemons, declared once: a YAML file, the environment, flags.

A setting is named by its path, for example ``pool.page_size``. Its value comes from the strongest source that has it:

1. flags (``--set pool.page_size=32``, or a named flag of the daemon),
2. the environment (``KVFERRY_POOL__PAGE_SIZE=32``: the path in capitals, ``__`` for each dot),
3. the YAML file,
4. the default.

A name that is no setting is refused in every source; only what Kubernetes sets for a Service is ignored. All that is wrong is
told at once, one line each: path, value, where it came from, what would be right.
``python -m transfer.config`` prints docs/configuration.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, cast, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from transfer.layout import DType, TokenOrder
from transfer.peer_names import checked_entry
from transfer.ring import ALIGNMENT_BYTES

ENVIRONMENT_PREFIX: Final = "KVFERRY_"

CPU_POOL_PAGES: Final = 1024
"""Pages of a pool on cpu that no setting sizes: a try-out should not take a laptop's whole memory."""

MIN_HEARTBEAT_S: Final = 0.05
MAX_HEARTBEAT_S: Final = 10.0
"""Faster beats are load, and slower ones notice a dead peer too late; what a peer asks for is held to the same range."""

EMBEDDED_ENGINE: Final = "embedded_engine.loading:load_engine"
"""The engine that comes with kvferry: a transformers model over the paged pool."""

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


_MOST_DIGITS: Final = 20
"""Of a size: 2**64 has as many, and what is reckoned with sizes stays in the range of a float."""


def parse_size(value: object) -> object:
    """Bytes of ``"64MiB"``, ``"1.5 GB"`` or ``4096``; anything that is no such text is left to the next check.

    Raises:
        ValueError: Text that is no size, or no whole number of bytes.
    """
    if isinstance(value, bool):
        raise ValueError("it must be a size in bytes, for example 4096 or 64MiB")
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError("it must be a size, for example 4096, 64MiB or 1GB (KiB, MiB, GiB, TiB; KB, MB, GB, TB)")
    if len(match[1]) > _MOST_DIGITS:
        raise ValueError(f"it must be a size of at most {_MOST_DIGITS} digits")
    num_bytes = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    if num_bytes != int(num_bytes):
        raise ValueError("it must be a whole number of bytes")
    return int(num_bytes)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


def _whole(value: object) -> object:
    """A choice among numbers, which come as text from the environment."""
    value = _no_bool(value)
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def _listed(value: object) -> object:
    """A list, or its comma-separated text, which is all that the environment has."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _host_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535 or (":" in host and host[0] != "["):
        raise ValueError("it must be host:port with a port from 1 to 65535, an IPv6 host in brackets")
    return value


def _host(value: str) -> str:
    if not value or any(letter.isspace() or letter in "/[]" for letter in value):
        raise ValueError("it must be a host name or an address, without port or brackets")
    return value


def _engine_name(value: str) -> str:
    module, colon, function = value.partition(":")
    if not colon or not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"it must be module:function, for example {EMBEDDED_ENGINE}")
    return value


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=86_400)]
SizeBytes = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
Port = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=65_535)]
Host = Annotated[str, AfterValidator(_host)]
EngineName = Annotated[str, AfterValidator(_engine_name)]
HostPort = Annotated[str, AfterValidator(_host_port)]
PeerName = Annotated[str, AfterValidator(checked_entry)]


class _Section(BaseModel):
    """Immutable; an unknown setting is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


class ParallelConfig(_Section):
    """How the model is spread over this node's rank processes."""

    tp_size: Count = Field(default=1, description="Tensor parallel degree: rank processes of this node, one per device.")
    pp_size: Annotated[Literal[1], BeforeValidator(_whole)] = Field(
        default=1, description="Pipeline parallel degree; the embedded engine has one stage."
    )
    threads_per_rank: Count = Field(default=1, description="CPU threads that a rank computes with.")


class PoolConfig(_Section):
    """The paged KV pool of each rank."""

    page_size: Count = Field(default=16, description="Tokens per page. The other tier may use another size.")
    num_pages: Count | None = Field(
        default=None,
        description=(
            "Most pages of each rank's pool; the memory plan can only lower it. Sliding windows and recurrent states get what so "
            f"many tokens need of them. null takes what the plan has room for on cuda, and {CPU_POOL_PAGES} on cpu."
        ),
    )
    num_tokens: Count | None = Field(
        default=None, description="Most tokens of each rank's pool, rounded up to whole pages; instead of pool.num_pages."
    )
    order: TokenOrder = Field(default=TokenOrder.NHD, description="Order of the dimensions inside a page.")
    dtype: DType | None = Field(default=None, description="Element type of the pool; null takes what the model computes in.")

    @model_validator(mode="after")
    def _resolve_pages(self) -> Self:
        if self.num_tokens is not None:
            if self.num_pages not in (None, -(-self.num_tokens // self.page_size)):
                raise ValueError(f"num_pages is {self.num_pages} and num_tokens is {self.num_tokens}; set one of them")
            object.__setattr__(self, "num_pages", -(-self.num_tokens // self.page_size))
        return self


class MemoryConfig(_Section):
    """What the memory plan of each rank goes by, see docs/memory.md."""

    device_memory: SizeBytes | None = Field(
        default=None,
        description="Memory of a rank's device; null asks the device, and on cpu shares the machine's among the ranks.",
    )
    policy: Literal["static-fraction", "page-count"] = Field(
        default="static-fraction", description="What leaves room for activations: a part of the device, or of what was free."
    )
    static_fraction: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, lt=1)] | None = Field(
        default=None, description="Part of the device for weights and pool; null computes it from the other settings."
    )
    memory_ratio: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, lt=1)] = Field(
        default=0.88, description="With the policy page-count: part of the memory free before loading for weights and pool."
    )


class ChunkConfig(_Section):
    """How a prompt is cut for computing and moving; decode nodes learn it when they join."""

    chunk_tokens: Count = Field(default=128, description="Tokens per chunk.")
    layers_per_group: CountOrZero | None = Field(
        default=None,
        description=(
            "Layers per chunk, so that the first layers travel while the last compute; 0 for all. null chooses them for each "
            "decode node, by chunk.piece_bytes."
        ),
    )
    piece_bytes: SizeBytes | None = Field(
        default=None,
        description=(
            "Most that one rank sends to another of a chunk, as far as fewer layers can make it so; instead of "
            "chunk.layers_per_group. null goes by what the probe measured of the links: bandwidth x cost of a piece."
        ),
    )

    @model_validator(mode="after")
    def _check_one_way_to_cut(self) -> Self:
        if self.piece_bytes is not None and self.layers_per_group is not None:
            raise ValueError(
                f"piece_bytes is {self.piece_bytes} and layers_per_group is {self.layers_per_group}; set one of them"
            )
        return self


class StagingConfig(_Section):
    """Where a prefill rank gathers chunks before it writes them."""

    num_slots: Annotated[int, BeforeValidator(_no_bool), Field(ge=2)] = Field(
        default=4,
        description="Chunks gathered, written or awaiting their release at once; 2 is the least that overlaps.",
    )
    slot_bytes: SizeBytes | None = Field(
        default=None, description="Size of a slot; null makes it as large as the largest chunk of this rank."
    )


class RingConfig(_Section):
    """The staging memory of a decode rank, into which prefill ranks write."""

    capacity_bytes: SizeBytes | None = Field(
        default=None,
        description=(
            f"Size of each rank's ring, a multiple of {ALIGNMENT_BYTES}; larger than the largest chunk. null: 64 MiB in host "
            "memory; on a GPU 2 GiB, or a 32nd of the device where that is less."
        ),
    )

    @model_validator(mode="after")
    def _check_alignment(self) -> Self:
        if self.capacity_bytes is not None and self.capacity_bytes % ALIGNMENT_BYTES:
            below = self.capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            raise ValueError(
                f"capacity_bytes is {self.capacity_bytes}; it must be a multiple of {ALIGNMENT_BYTES}, "
                f"for example {below + ALIGNMENT_BYTES}"
            )
        return self


class UcxConfig(_Section):
    """Settings of the ``ucx`` transport."""

    lane: Literal["auto", "shm", "net"] = Field(
        default="auto",
        description=(
            "How two ends of one host are joined. shm: shared memory (one copy); net: whatever UCX finds (RDMA, TCP). "
            "auto: shm where it works, else net."
        ),
    )


class CudaIpcConfig(_Section):
    """Settings of the ``cuda_ipc`` transport."""

    mode: Literal["fused", "copy"] = Field(
        default="fused",
        description=(
            "fused: the gather kernel stores straight into the decode rank's ring over NVLink; "
            "copy: it fills staging memory, which is copied."
        ),
    )


class NixlConfig(_Section):
    """Settings of the ``nixl`` transport."""

    lane: Literal["auto", "shm", "net"] = Field(
        default="auto",
        description=(
            "How two ends of one host are joined. shm: shared memory, or NVLink between GPUs; net: what joins hosts (RDMA, TCP). "
            "auto: shm where it works, else net."
        ),
    )
    backend: Annotated[str, Field(min_length=1)] = Field(default="UCX", description="NIXL's backend, by its own name.")


class TransportConfig(_Section):
    """The data plane; both tiers must name the same one."""

    name: Literal["ucx", "inproc", "nixl", "cuda_ipc"] = Field(
        default="ucx", description="What carries the bytes; not inproc in a daemon, for it joins two ends of one process."
    )
    ucx: UcxConfig = Field(default_factory=UcxConfig, description="Settings of the ucx transport.")
    nixl: NixlConfig = Field(default_factory=NixlConfig, description="Settings of the nixl transport.")
    cuda_ipc: CudaIpcConfig = Field(default_factory=CudaIpcConfig, description="Settings of the cuda_ipc transport.")
    min_bandwidth_bytes_per_s: Annotated[float, BeforeValidator(parse_size), Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="A link that measures less at attach is not used, whichever side asks for more; 0 takes any."
    )
    probe_bytes: SizeBytes = Field(default=4 << 20, description="Size of the write that measures a link's bandwidth at attach.")


class ServerConfig(_Section):
    """Where this node listens."""

    host: Host = Field(
        default="127.0.0.1",
        description=(
            "Address that every port of the node binds. The data plane's own ports are on the loopback device where this is a "
            "loopback address, else on those of UCX_NET_DEVICES (default: all)."
        ),
    )
    port: Port = Field(default=0, description="Port of the public gRPC API; 0 takes a free one.")
    http_port: Port = Field(default=0, description="Port of /healthz, /readyz and /metrics; 0 takes a free one.")
    advertise_host: Host | None = Field(
        default=None, description="Host that peers are told to connect to; null is server.host. Needed with a wildcard host."
    )

    @property
    def advertised_host(self) -> str:
        return self.advertise_host or self.host

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.host in ("0.0.0.0", "::", "*") and self.advertise_host is None:
            raise ValueError(f"host is {self.host}, which no peer can connect to; advertise_host must name this machine")
        if self.port and self.port == self.http_port:
            raise ValueError(f"port and http_port are both {self.port}; they must differ")
        return self


class PeersConfig(_Section):
    """The other tier."""

    prefill_nodes: Annotated[tuple[HostPort, ...], BeforeValidator(_listed)] = Field(
        default=(), description="host:port of each prefill node's gRPC API. In the environment: separated by commas."
    )

    @model_validator(mode="after")
    def _check_repeats(self) -> Self:
        repeated = sorted({node for node in self.prefill_nodes if self.prefill_nodes.count(node) > 1})
        if repeated:
            raise ValueError(f"prefill_nodes names {', '.join(repeated)} more than once; each must be there once")
        return self


class TlsConfig(_Section):
    """Who may reach this process, and whom it reaches: mutual TLS on every gRPC port, see docs/operations.md."""

    cert_file: Path | None = Field(
        default=None,
        description="PEM certificate of this process, with the intermediate ones behind it; read again when it changes.",
    )
    key_file: Path | None = Field(
        default=None, description="PEM private key of that certificate, without a passphrase; not readable by everybody."
    )
    ca_file: Path | None = Field(
        default=None, description="PEM certificates of the authorities that the other side's certificate must be signed by."
    )
    peer_names: Annotated[tuple[PeerName, ...], BeforeValidator(_listed)] = Field(
        default=(),
        description=(
            "Names (DNS or URI) of the other tier's certificates: who may join, prefill, reserve and attach, and whom this node "
            "connects to. *.example.org stands for one label. In the environment: separated by commas."
        ),
    )
    client_names: Annotated[tuple[PeerName, ...], BeforeValidator(_listed)] = Field(
        default=(),
        description="Names of the certificates of clients and operators: who may generate, abort, drain and ask for the status.",
    )
    insecure: Annotated[Literal[0, 1, 2], BeforeValidator(_whole)] = Field(
        default=0,
        description=(
            "How often --insecure was given: 1 does without TLS on loopback addresses, 2 on any. Whoever reaches a port is then "
            "let in."
        ),
    )

    @property
    def is_set_up(self) -> bool:
        """Whether there is TLS."""
        return self.cert_file is not None

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        files = {"cert_file": self.cert_file, "key_file": self.key_file, "ca_file": self.ca_file}
        missing = [name for name, file in files.items() if file is None]
        given = next((name for name, file in files.items() if file is not None), None)
        if given is not None and missing:
            raise ValueError(f"{given} is {files[given]} and {missing[0]} is missing; TLS needs cert_file, key_file and ca_file")
        if given is not None and self.insecure:
            raise ValueError(f"insecure is {self.insecure} and cert_file is {self.cert_file}; set one of them")
        return self


class LimitsConfig(_Section):
    """Bounds of what the node takes on."""

    max_queued_requests: CountOrZero = Field(default=256, description="Requests that may wait; more are refused at once.")
    max_running_requests: Count = Field(default=32, description="Requests computed, transferred or generated at once.")
    max_seq_len: Count | None = Field(
        default=None, description="Tokens of a request, prompt and generation together, at most; null is the model's context."
    )
    queue_timeout_s: Seconds = Field(default=60.0, description="Longest wait for room before a request is refused.")
    step_timeout_s: Seconds = Field(
        default=600.0,
        description="An engine of which no step ends for so long is taken to hang: its ranks are started again.",
    )


class PrefillLimitsConfig(LimitsConfig):
    """Bounds that only a node which computes prompts has on top."""

    max_step_tokens: Count = Field(default=512, description="Tokens that one step of the engine computes at most.")


class DecodeLimitsConfig(LimitsConfig):
    """Bounds that only a node which has prompts computed elsewhere has on top."""

    prefill_retries: CountOrZero = Field(
        default=1,
        description=(
            "Times that a request is tried again on another prefill node, when its own is lost before its first token has been "
            "told; 0 never."
        ),
    )


class HeartbeatConfig(_Section):
    """How a dead peer is noticed: three missed beats, on every stream."""

    interval_s: Annotated[float, BeforeValidator(_no_bool), Field(ge=MIN_HEARTBEAT_S, le=MAX_HEARTBEAT_S)] = Field(
        default=0.5, description="Seconds between beats; a dead peer is noticed after 3 to 3.5 of them."
    )


class RestartConfig(_Section):
    """What happens when a rank process dies."""

    max_restarts: CountOrZero = Field(default=3, description="Times that the ranks are started again before the node gives up.")
    backoff_s: Seconds = Field(default=1.0, description="Pause before the first restart; doubled at each further one.")
    max_backoff_s: Seconds = Field(default=30.0, description="Longest pause before a restart.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_backoff_s < self.backoff_s:
            raise ValueError(f"max_backoff_s is {self.max_backoff_s}; it must be at least backoff_s, {self.backoff_s}")
        return self


class BreakerConfig(_Section):
    """When a prefill node is left out for a while, as long as others are joined; the loss of a node always does that."""

    failures: Count = Field(
        default=5, description="Requests that fail by a prefill node's fault, within breaker.window_s, before it is left out."
    )
    window_s: Seconds = Field(default=10.0, description="Seconds after which such a failure counts no more.")
    pause_s: Seconds = Field(
        default=1.0, description="Seconds for which a node is left out before one request tries it; doubled at each further time."
    )
    max_pause_s: Seconds = Field(
        default=30.0, description="Longest such pause; a node that has served for so long begins with breaker.pause_s again."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_pause_s < self.pause_s:
            raise ValueError(f"max_pause_s is {self.max_pause_s}; it must be at least pause_s, {self.pause_s}")
        return self


class LogConfig(_Section):
    """The node's log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe that is written; debug has a line per chunk."
    )
    format: Literal["text", "json"] = Field(default="text", description="Lines for people, or one JSON object per line.")


class ProcessConfig(_Section):
    """What every process is set up with, also a command that only calls a node."""

    role: ClassVar[str]

    tls: TlsConfig = Field(default_factory=TlsConfig, description="Security of the gRPC API.")


class ClientConfig(ProcessConfig):
    """Settings of the commands that call a node."""

    role: ClassVar[str] = "client"


class NodeConfig(ProcessConfig):
    """What both daemons are set up with."""

    model: Path = Field(description="Hugging Face model directory: config.json, safetensors, tokenizer.")
    engine: EngineName = Field(
        default=EMBEDDED_ENGINE,
        description="What loads the engine of a rank, as module:function; the engine folders of both nodes say what it gives.",
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="What the ranks compute on; cuda: a GPU for each rank.")
    first_device: CountOrZero = Field(
        default=0, description="Rank 0's GPU, as CUDA counts the visible ones; the other ranks have those that follow."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="What the model computes in, the same on both nodes; null takes what its weights are stored in."
    )
    dummy_weights: bool = Field(
        default=False, description="Random weights from config.json alone, the same in every cut: to try sizes and speed."
    )
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Parallel degrees.")
    pool: PoolConfig = Field(default_factory=PoolConfig, description="The KV pool.")
    memory: MemoryConfig = Field(default_factory=MemoryConfig, description="The memory plan.")
    transport: TransportConfig = Field(default_factory=TransportConfig, description="The data plane.")
    server: ServerConfig = Field(default_factory=ServerConfig, description="Addresses.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="Bounds.")
    heartbeat: HeartbeatConfig = Field(default_factory=HeartbeatConfig, description="Beats.")
    restart: RestartConfig = Field(default_factory=RestartConfig, description="Restarts of the rank group.")
    log: LogConfig = Field(default_factory=LogConfig, description="The log.")
    drain_timeout_s: Seconds = Field(
        default=30.0, description="On SIGTERM or Drain: time that requests in flight get before they are cut off."
    )
    ready_file: Path | None = Field(
        default=None, description="File that is written, as JSON with the node's addresses, once it is ready; null writes none."
    )

    @property
    def most_pages(self) -> int | None:
        """Pages of each rank's pool that no memory plan may go beyond; None where only the plan says how many."""
        return self.pool.num_pages or (CPU_POOL_PAGES if self.device == "cpu" else None)


class PrefillNodeConfig(NodeConfig):
    """Settings of ``prefill-node``."""

    role: ClassVar[str] = "prefill"

    limits: PrefillLimitsConfig = Field(default_factory=PrefillLimitsConfig, description="Bounds.")
    chunk: ChunkConfig = Field(default_factory=ChunkConfig, description="How prompts are cut.")
    staging: StagingConfig = Field(default_factory=StagingConfig, description="Staging memory.")

    @model_validator(mode="after")
    def _check_chunk_fits_pool(self) -> Self:
        if self.most_pages is None:
            return self  # sized by the memory plan
        pool_tokens = self.most_pages * self.pool.page_size
        if self.chunk.chunk_tokens > pool_tokens:
            raise ValueError(
                f"chunk.chunk_tokens is {self.chunk.chunk_tokens}; it must fit the pool's {pool_tokens} tokens "
                f"({self.most_pages} pages of {self.pool.page_size})"
            )
        return self


class DecodeNodeConfig(NodeConfig):
    """Settings of ``decode-node``."""

    role: ClassVar[str] = "decode"

    cuda_graph_max_bs: CountOrZero | None = Field(
        default=None,
        description=(
            "Largest decode batch that is captured into a CUDA graph; 0 captures none, null is limits.max_running_requests. "
            "Without effect on cpu."
        ),
    )
    limits: DecodeLimitsConfig = Field(default_factory=DecodeLimitsConfig, description="Bounds.")
    ring: RingConfig = Field(default_factory=RingConfig, description="The ring.")
    peers: PeersConfig = Field(default_factory=PeersConfig, description="The prefill tier.")
    breaker: BreakerConfig = Field(default_factory=BreakerConfig, description="Circuit breakers of the prefill nodes.")


def section_type(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a section; None where the field is a setting."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting of a section and of those inside it, as (path, field)."""
    for name, field in section.model_fields.items():
        inner = section_type(field)
        if inner is None:
            yield f"{prefix}{name}", field
        else:
            yield from settings(inner, f"{prefix}{name}.")


def configuration_page() -> str:
    """docs/configuration.md: every setting with its type, default and meaning."""
    lines = [
        "# Configuration",
        "",
        "Generated by `python -m transfer.config`; do not edit.",
        "",
        "A setting comes from the strongest source that has it: flags (`--set pool.page_size=32`), the environment",
        f"(`{ENVIRONMENT_PREFIX}POOL__PAGE_SIZE=32`), the YAML file, the default. A name that is no setting is refused.",
        "What Kubernetes sets for a Service named `kvferry` or `kvferry-NAME` is ignored",
        f"(`{ENVIRONMENT_PREFIX}NAME_SERVICE_HOST`, `{ENVIRONMENT_PREFIX}NAME_PORT_7001_TCP` and the like), but not where NAME",
        "begins with the name of a section below, such as `server`: give the pod `enableServiceLinks: false` then.",
        "Sizes are bytes, or text such as `64MiB` or `1GB`. `null` stands for no value.",
    ]
    common = dict(settings(NodeConfig))
    for title, config_type in (
        ("Both nodes", NodeConfig),
        ("prefill-node", PrefillNodeConfig),
        ("decode-node", DecodeNodeConfig),
    ):
        lines += ["", f"## {title}", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
        for path, field in settings(config_type):
            if config_type is NodeConfig or path not in common:
                lines.append(f"| `{path}` | {_type_text(field)} | {_default_text(field)} | {field.description} |")
    return "\n".join(lines) + "\n"


def _type_text(field: FieldInfo) -> str:
    annotation = field.annotation
    choices = [part for part in get_args(annotation) if part is not type(None)]
    suffix = " or null" if type(None) in get_args(annotation) else ""
    kind = choices[0] if suffix and len(choices) == 1 else annotation
    if get_args(kind) and hasattr(kind, "__metadata__"):
        field = FieldInfo.from_annotation(cast(Any, kind))
        kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        text = ", ".join(f"`{member.value}`" for member in kind)
    elif str(kind).startswith("typing.Literal"):
        text = ", ".join(f"`{choice}`" for choice in get_args(kind))
    elif any(isinstance(part, BeforeValidator) and part.func is parse_size for part in field.metadata):
        text = "size"
    elif kind is int:
        text = "whole number" + _bounds(field)
    elif kind is float:
        text = "number" + _bounds(field)
    elif kind is Path:
        text = "path"
    elif kind is bool:
        text = "`true`, `false`"
    else:
        text = "list of text" if str(kind).startswith("tuple") else "text"
    return text + suffix


def _bounds(field: FieldInfo) -> str:
    words = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    found = [
        words[name].format(f"{bound:g}" if isinstance(bound := getattr(part, name), float) else bound)
        for part in field.metadata
        for name in words
        if getattr(part, name, None) is not None
    ]
    return f", {', '.join(found)}" if found else ""


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if default is None:
        return "`null`"
    if isinstance(default, tuple):
        return "`[]`" if not default else f"`{list(default)}`"
    if isinstance(default, bool):
        return f"`{default}`".lower()
    if isinstance(default, int) and default >= 1 << 20 and default % (1 << 20) == 0:
        return f"`{default >> 20}MiB`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
