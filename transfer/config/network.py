"""Sections for connections between processes: transport, addresses, peers, TLS, discovery of nodes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from transfer.config.values import (
    Host,
    HostPort,
    PeerName,
    Port,
    Section,
    SizeBytes,
    checked_host_port,
    listed,
    no_bool,
    parse_size,
    whole,
)


class UcxConfig(Section):
    """Settings of the ``ucx`` transport."""

    lane: Literal["auto", "shm", "net"] = Field(
        default="auto",
        description=(
            "Connection of two ends on one host. shm: shared memory (one copy); net: RDMA or TCP, as UCX finds it; "
            "auto: shm if it works, otherwise net."
        ),
    )


class CudaIpcConfig(Section):
    """Settings of the ``cuda_ipc`` transport."""

    mode: Literal["fused", "copy"] = Field(
        default="fused",
        description=(
            "fused: the gather kernel stores directly into the decode rank's ring over NVLink; "
            "copy: it fills staging memory, which is copied."
        ),
    )
    handles: Literal["ipc", "fabric"] = Field(
        default="ipc",
        description=(
            "Handles of the memory that peers map. ipc: CUDA IPC, within one host. fabric: also to other hosts of an NVLink "
            "domain; not implemented, therefore rejected."
        ),
    )

    @model_validator(mode="after")
    def _check_handles(self) -> Self:
        if self.handles == "fabric":
            raise ValueError(
                "handles is fabric, and memory with fabric handles (multi-node NVLink) is not implemented; set it to ipc, and "
                "transport.name to auto, nixl or ucx between hosts"
            )
        return self


class NixlConfig(Section):
    """Settings of the ``nixl`` transport."""

    lane: Literal["auto", "shm", "net"] = Field(
        default="auto",
        description=(
            "Connection of two ends on one host. shm: shared memory, or NVLink between GPUs; net: RDMA or TCP, as between hosts; "
            "auto: shm if it works, otherwise net."
        ),
    )
    backend: Annotated[str, Field(min_length=1)] = Field(default="UCX", description="NIXL's backend, by its own name.")


_PROTOCOLS: Final = ("tcp", "rdma", "rc", "ib", "roce", "nvlink")


def _transport_name(value: object) -> object:
    """Explain names of protocols, which are no transports of kvferry."""
    if isinstance(value, str) and value.lower() in _PROTOCOLS:
        raise ValueError(f"it must be auto, shm, ucx, nixl or cuda_ipc; {value} is a protocol, which nixl or ucx uses")
    return value


class TransportConfig(Section):
    """The data plane. The two tiers need a transport in common."""

    name: Annotated[Literal["auto", "shm", "ucx", "nixl", "cuda_ipc", "inproc"], BeforeValidator(_transport_name)] = Field(
        default="auto",
        description=(
            "Transport of the KV. auto chooses for each pair of ranks: cuda_ipc between GPUs with peer access, shm between pools "
            "in host memory of one machine, nixl with RDMA, otherwise ucx or nixl. inproc works only within one process, "
            "which excludes engines."
        ),
    )
    ucx: UcxConfig = Field(default_factory=UcxConfig, description="Settings of the ucx transport.")
    nixl: NixlConfig = Field(default_factory=NixlConfig, description="Settings of the nixl transport.")
    cuda_ipc: CudaIpcConfig = Field(default_factory=CudaIpcConfig, description="Settings of the cuda_ipc transport.")
    min_bandwidth_bytes_per_s: Annotated[float, BeforeValidator(parse_size), Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0,
        description=(
            "Minimum link bandwidth. Slower links are rejected at attach; the higher value of both sides applies. "
            "0 disables the check."
        ),
    )
    probe_bytes: SizeBytes = Field(default=4 << 20, description="Size of the write that measures a link's bandwidth at attach.")


class ServerConfig(Section):
    """Where this node listens."""

    host: Host = Field(
        default="127.0.0.1",
        description=(
            "Address that the node's ports bind. With a loopback address, UCX uses only the loopback device, otherwise those "
            "of UCX_NET_DEVICES (default: all)."
        ),
    )
    port: Port = Field(default=0, description="Port of the public gRPC API; 0 takes a free one.")
    http_port: Port = Field(default=0, description="Port of /healthz, /readyz, /metrics and the status page; 0 takes a free one.")
    advertise_host: Host | None = Field(
        default=None, description="Host that peers connect to; null means server.host. Required with a wildcard host."
    )

    @property
    def advertised_host(self) -> str:
        return self.advertise_host or self.host

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.host in ("0.0.0.0", "::", "*") and self.advertise_host is None:
            raise ValueError(f"host is {self.host}, which no peer can connect to; server.advertise_host must name this machine")
        if self.port and self.port == self.http_port:
            raise ValueError(f"port and http_port are both {self.port}; they must differ")
        return self


class NodeServerConfig(ServerConfig):
    """As `ServerConfig`, with the ports of a daemon. An engine can host several instances on one machine."""

    port: Port = Field(default=7100, description="Port of the public gRPC API; 0 takes a free one.")
    http_port: Port = Field(
        default=7180, description="Port of /healthz, /readyz, /metrics and the status page; 0 takes a free one."
    )


class PeersConfig(Section):
    """The other tier."""

    prefill_nodes: Annotated[tuple[HostPort, ...], BeforeValidator(listed)] = Field(
        default=(), description="host:port of each prefill node's gRPC API. In the environment: separated by commas."
    )

    @model_validator(mode="after")
    def _check_repeats(self) -> Self:
        repeated = sorted({node for node in self.prefill_nodes if self.prefill_nodes.count(node) > 1})
        if repeated:
            raise ValueError(f"prefill_nodes names {', '.join(repeated)} more than once; each must be there once")
        return self


class LeaderConfig(Section):
    """The port to which the ranks of an engine that spans hosts connect. The settings are the same on all of its hosts."""

    address: HostPort | None = Field(
        default=None,
        description=(
            "host:port on the first of the engine's hosts, where its scheduler runs. null: all ranks are on one host, and "
            "connect to their leader over a Unix socket."
        ),
    )
    peer_names: Annotated[tuple[PeerName, ...], BeforeValidator(listed)] = Field(
        default=(),
        description=(
            "Names (DNS or URI) of the certificates of the engine's own hosts, as tls.peer_names. Needed with leader.address and "
            "TLS. In the environment: separated by commas."
        ),
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.peer_names and self.address is None:
            raise ValueError(f"peer_names is {', '.join(self.peer_names)} and address is missing; set both or neither")
        return self


class TlsConfig(Section):
    """Mutual TLS on every gRPC port, see docs/tls.md."""

    cert_file: Path | None = Field(
        default=None,
        description="PEM certificate of this process and its intermediate certificates. A changed file is read again.",
    )
    key_file: Path | None = Field(
        default=None,
        description="PEM private key of that certificate, without a passphrase. Rejected if all users can read or write it.",
    )
    ca_file: Path | None = Field(
        default=None, description="PEM certificates of the authorities that sign the other side's certificates."
    )
    peer_names: Annotated[tuple[PeerName, ...], BeforeValidator(listed)] = Field(
        default=(),
        description=(
            "Names (DNS or URI) of the other tier's certificates. These peers may join, prefill, reserve and attach, and this "
            "node connects to them. *.example.org stands for one label. In the environment: separated by commas."
        ),
    )
    client_names: Annotated[tuple[PeerName, ...], BeforeValidator(listed)] = Field(
        default=(),
        description="Names of the certificates of clients and operators, who may generate, abort, drain and read the status.",
    )
    insecure: Annotated[Literal[0, 1, 2], BeforeValidator(whole)] = Field(
        default=0,
        description=(
            "Plain text instead of TLS. 1 allows it on loopback addresses (--insecure), 2 on any (--insecure-anywhere). Every "
            "caller that reaches a port is then accepted."
        ),
    )

    @property
    def is_set_up(self) -> bool:
        """Whether TLS is configured."""
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


_OWN_SETTINGS: Final = {"static": ("file",), "dns": ("dns_name",), "etcd": ("etcd_endpoints",)}
"""Settings that only one kind uses. The other settings of etcd have no effect without these."""

_LEAST_LOOK_S: Final = 0.1
"""Least pause between two looks. Without it, they would use a core of the node and overload a name server or etcd."""

_PREFIX: Final = re.compile(r"[!-~]{1,200}")


def _checked_endpoint(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    try:
        if not separator or scheme not in ("http", "https"):
            raise ValueError
        checked_host_port(rest)
    except ValueError:
        raise ValueError("it must be https://host:port or http://host:port, an IPv6 host in brackets") from None
    return value


def _checked_prefix(value: str) -> str:
    if _PREFIX.fullmatch(value) is None:
        raise ValueError("it must have 1 to 200 visible ASCII characters, for example kvferry/prefill/")
    return value


EtcdEndpoint = Annotated[str, AfterValidator(_checked_endpoint)]
EtcdPrefix = Annotated[str, AfterValidator(_checked_prefix)]


class DiscoveryConfig(Section):
    """Discovery of prefill nodes by decode nodes; see docs/discovery.md."""

    kind: Literal["static", "dns", "etcd"] = Field(
        default="static",
        description=(
            "Source of prefill nodes. static: peers.prefill_nodes or discovery.file; dns: every address of discovery.dns_name; "
            "etcd: registered nodes. Prefill nodes set it only for etcd."
        ),
    )
    file: Path | None = Field(
        default=None, description="static: YAML list of the host:port of each prefill node, instead of peers.prefill_nodes."
    )
    dns_name: HostPort | None = Field(
        default=None, description="dns: host:port of a name whose addresses are prefill nodes, such as a headless Service."
    )
    interval_s: Annotated[float, BeforeValidator(no_bool), Field(ge=_LEAST_LOOK_S, le=86_400)] = Field(
        default=5.0,
        description="Seconds between two reads of the file or the name. etcd: seconds until a silent watch is checked.",
    )
    grace_s: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=86_400)] = Field(
        default=30.0,
        description=(
            "Seconds after which a removed prefill node is left, once nothing is in flight there. Until then it gets requests "
            "only if no other node can take them."
        ),
    )
    etcd_endpoints: Annotated[tuple[EtcdEndpoint, ...], BeforeValidator(listed)] = Field(
        default=(),
        description=(
            "etcd: https://host:port of each member, tried in turn. http:// needs the same settings as plain text. "
            "In the environment: separated by commas."
        ),
    )
    etcd_prefix: EtcdPrefix = Field(
        default="kvferry/prefill/", description="etcd: prefix of the keys of this cluster's prefill nodes."
    )
    lease_s: Annotated[int, BeforeValidator(no_bool), Field(ge=2, le=3600)] = Field(
        default=10, description="etcd: seconds without a renewal after which a prefill node is removed."
    )
    etcd_ca_file: Path | None = Field(
        default=None, description="etcd: PEM certificates of its authorities. null uses those of gRPC."
    )
    etcd_cert_file: Path | None = Field(default=None, description="etcd: PEM certificate of this client, if etcd asks for one.")
    etcd_key_file: Path | None = Field(default=None, description="etcd: PEM private key of that certificate.")
    etcd_user: Annotated[str, Field(max_length=256)] = Field(default="", description="etcd: user. Empty means no authentication.")
    etcd_password_file: Path | None = Field(
        default=None, description="etcd: file with that user's password, read at each connection."
    )

    @property
    def finds_nodes(self) -> bool:
        """Whether prefill nodes come and go at run time."""
        return self.kind != "static" or self.file is not None

    def check_one_list(self, prefill_nodes: tuple[str, ...]) -> None:
        """Raise ValueError if `peers.prefill_nodes` names nodes besides those that are found."""
        if prefill_nodes and self.finds_nodes:
            other = f"discovery.kind is {self.kind}" if self.kind != "static" else f"discovery.file is {self.file}"
            raise ValueError(f"peers.prefill_nodes is {', '.join(prefill_nodes)} and {other}; set one of them")

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        for kind, names in _OWN_SETTINGS.items():
            for name in names:
                value = getattr(self, name)
                if value and kind != self.kind:
                    shown = ", ".join(value) if isinstance(value, tuple) else value
                    raise ValueError(f"{name} is {shown} and kind is {self.kind}; set discovery.kind to {kind}, or leave it out")
        if self.kind == "dns" and self.dns_name is None:
            raise ValueError("kind is dns and dns_name is missing; it must be host:port, for example kvferry-prefill:7100")
        if self.kind == "etcd" and not self.etcd_endpoints:
            raise ValueError("kind is etcd and etcd_endpoints is empty; it must name members, for example https://etcd-0:2379")
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        for name, other in (("etcd_cert_file", "etcd_key_file"), ("etcd_user", "etcd_password_file")):
            given, missing = (name, other) if getattr(self, name) else (other, name)
            if getattr(self, given) and not getattr(self, missing):
                raise ValueError(f"{given} is {getattr(self, given)} and {missing} is missing; set both or neither")
        if len(set(self.etcd_endpoints)) < len(self.etcd_endpoints):
            raise ValueError("etcd_endpoints names a member more than once; each must be there once")
        return self
