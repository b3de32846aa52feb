"""Sections of how a process reaches others, and who reaches it: transport, addresses, peers, TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from transfer.config.values import Host, HostPort, PeerName, Port, Section, SizeBytes, listed, parse_size, whole


class UcxConfig(Section):
    """Settings of the ``ucx`` transport."""

    lane: Literal["auto", "shm", "net"] = Field(
        default="auto",
        description=(
            "How two ends of one host are joined. shm: shared memory (one copy); net: whatever UCX finds (RDMA, TCP). "
            "auto: shm where it works, else net."
        ),
    )


class CudaIpcConfig(Section):
    """Settings of the ``cuda_ipc`` transport."""

    mode: Literal["fused", "copy"] = Field(
        default="fused",
        description=(
            "fused: the gather kernel stores straight into the decode rank's ring over NVLink; "
            "copy: it fills staging memory, which is copied."
        ),
    )


class NixlConfig(Section):
    """Settings of the ``nixl`` transport."""

    lane: Literal["auto", "shm", "net"] = Field(
        default="auto",
        description=(
            "How two ends of one host are joined. shm: shared memory, or NVLink between GPUs; net: what joins hosts (RDMA, TCP). "
            "auto: shm where it works, else net."
        ),
    )
    backend: Annotated[str, Field(min_length=1)] = Field(default="UCX", description="NIXL's backend, by its own name.")


class TransportConfig(Section):
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


class ServerConfig(Section):
    """Where this node listens."""

    host: Host = Field(
        default="127.0.0.1",
        description=(
            "Address that every port of the node binds. The data plane's own ports are on the loopback device where this is a "
            "loopback address, else on those of UCX_NET_DEVICES (default: all)."
        ),
    )
    port: Port = Field(default=0, description="Port of the public gRPC API; 0 takes a free one.")
    http_port: Port = Field(
        default=0, description="Port of /healthz, /readyz and /metrics, and of a daemon's status page; 0 takes a free one."
    )
    advertise_host: Host | None = Field(
        default=None, description="Host that peers are told to connect to; null is server.host. Needed with a wildcard host."
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


class TlsConfig(Section):
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
    peer_names: Annotated[tuple[PeerName, ...], BeforeValidator(listed)] = Field(
        default=(),
        description=(
            "Names (DNS or URI) of the other tier's certificates: who may join, prefill, reserve and attach, and whom this node "
            "connects to. *.example.org stands for one label. In the environment: separated by commas."
        ),
    )
    client_names: Annotated[tuple[PeerName, ...], BeforeValidator(listed)] = Field(
        default=(),
        description="Names of the certificates of clients and operators: who may generate, abort, drain and ask for the status.",
    )
    insecure: Annotated[Literal[0, 1, 2], BeforeValidator(whole)] = Field(
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
