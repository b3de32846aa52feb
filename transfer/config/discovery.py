"""The section of how nodes find each other: which prefill nodes there are now, while they come and go."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from transfer.config.values import HostPort, Section, checked_host_port, listed, no_bool

_OWN_SETTINGS: Final = {"static": ("file",), "dns": ("dns_name",), "etcd": ("etcd_endpoints",)}
"""What a kind has that no other one can use; the rest of the settings of etcd say nothing by themselves."""

_LEAST_LOOK_S: Final = 0.1
"""Looks without a pause would take a core of the node, and ask a name server or etcd as fast as it answers."""

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
    """How decode nodes learn which prefill nodes there are; see docs/operations.md."""

    kind: Literal["static", "dns", "etcd"] = Field(
        default="static",
        description=(
            "static: peers.prefill_nodes, or discovery.file; dns: every address of discovery.dns_name; etcd: prefill nodes "
            "register themselves there. Prefill nodes need it for etcd alone."
        ),
    )
    file: Path | None = Field(
        default=None, description="static: YAML list of the host:port of each prefill node, in place of peers.prefill_nodes."
    )
    dns_name: HostPort | None = Field(
        default=None, description="dns: host:port of a name of which every address is a prefill node, such as a headless Service."
    )
    interval_s: Annotated[float, BeforeValidator(no_bool), Field(ge=_LEAST_LOOK_S, le=86_400)] = Field(
        default=5.0,
        description="Seconds between two looks at the file or the name; etcd: until a silent watch is checked.",
    )
    grace_s: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=86_400)] = Field(
        default=30.0,
        description=(
            "A prefill node that is named no longer gets requests only where no other one can take them, and is left after so "
            "many seconds, once nothing is in flight there."
        ),
    )
    etcd_endpoints: Annotated[tuple[EtcdEndpoint, ...], BeforeValidator(listed)] = Field(
        default=(),
        description=(
            "etcd: https://host:port of each member, tried in turn; http:// needs what plain text needs. In the environment: "
            "separated by commas."
        ),
    )
    etcd_prefix: EtcdPrefix = Field(
        default="kvferry/prefill/", description="etcd: what the keys of this cluster's prefill nodes begin with."
    )
    lease_s: Annotated[int, BeforeValidator(no_bool), Field(ge=2, le=3600)] = Field(
        default=10, description="etcd: a prefill node that is not heard of for so many seconds is no longer named."
    )
    etcd_ca_file: Path | None = Field(
        default=None, description="etcd: PEM certificates of its authorities; null takes those that gRPC brings along."
    )
    etcd_cert_file: Path | None = Field(
        default=None, description="etcd: PEM certificate of this client, where etcd asks for one."
    )
    etcd_key_file: Path | None = Field(default=None, description="etcd: PEM private key of that certificate.")
    etcd_user: Annotated[str, Field(max_length=256)] = Field(
        default="", description="etcd: user, where it has authentication; empty: none."
    )
    etcd_password_file: Path | None = Field(
        default=None, description="etcd: file with that user's password, read at each connection."
    )

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
