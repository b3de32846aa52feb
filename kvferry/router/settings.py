"""Settings of a router, from the options of `kvferry route`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvferry.cli.options import check_range, member
from transfer.config import parse_size
from transfer.config.values import checked_host_port
from transfer.errors import ConfigError

NODE_SCHEME: Final = "grpc://"
_SCHEMES: Final = ("http://", "https://", NODE_SCHEME)
_LEAST_HEALTH_S: Final = 0.05


class FlowKind(StrEnum):
    """Order of the calls to a prompt's two servers."""

    CONCURRENT = "concurrent"  # both at once, if the prefill server's KV address is known
    SEQUENTIAL = "sequential"  # decode after prefill has answered


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """See `kvferry route --help`.

    Args:
        prefill: URLs of vLLM prefill servers or prefill nodes; empty if decode nodes have their own.
        decode: URLs of vLLM decode servers or decode nodes.
        max_body_bytes: Largest body of a client's request.
        max_body_total_bytes: Largest size of the bodies of all running requests.

    Raises:
        ConfigError: A value is out of range.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    flow: FlowKind = FlowKind.CONCURRENT
    host: str = "127.0.0.1"
    port: int = 8000
    retries: int = 2
    max_requests: int = 1024
    max_body_bytes: int = 8 << 20
    max_body_total_bytes: int = 256 << 20
    connect_timeout_s: float = 5.0
    health_interval_s: float = 1.0
    lost_after_s: float = 30.0
    drain_timeout_s: float = 60.0
    tokenizer: Path | None = None
    model_name: str | None = None
    ready_file: Path | None = None

    def __post_init__(self) -> None:
        for name, number, least, most in (
            ("--port", self.port, 0, 65_535),
            ("--retries", self.retries, 0, 100),
            ("--max-requests", self.max_requests, 1, 1 << 20),
            ("--max-body", self.max_body_bytes, 1024, 1 << 30),
            ("--max-body-total", self.max_body_total_bytes, self.max_body_bytes, 1 << 40),
        ):
            check_range(name, number, least, most)
        for name, seconds in (
            ("--connect-timeout", self.connect_timeout_s),
            ("--lost-after", self.lost_after_s),
        ):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(f"{name} is {seconds}; it must be a number of seconds above 0")
        if not _LEAST_HEALTH_S <= self.health_interval_s < math.inf:
            raise ConfigError(f"--health-interval is {self.health_interval_s}; it must be at least {_LEAST_HEALTH_S} seconds")
        if not (math.isfinite(self.drain_timeout_s) and self.drain_timeout_s >= 0):
            raise ConfigError(f"--drain-timeout is {self.drain_timeout_s}; it must be a number of seconds from 0")


def router_settings(
    *,
    prefill: Sequence[str],
    decode: Sequence[str],
    flow: str | None,
    max_body: str,
    max_body_total: str,
    tokenizer: Path | None,
    model_name: str | None,
    **others: Any,
) -> RouterSettings:
    """Return the settings that a command's arguments describe.

    Args:
        others: Fields of `RouterSettings` that are the arguments themselves.

    Raises:
        ConfigError: An argument is wrong, or two arguments exclude each other.
    """
    if not decode:
        raise ConfigError(
            "--decode is missing; give a vLLM server (http://host:port) or a kvferry decode node (grpc://host:port)"
        )
    if _are_nodes("--decode", decode):
        if prefill:
            raise ConfigError(f"--prefill is {prefill[0]}; a kvferry decode node (grpc://) has its own list of prefill nodes")
        if flow is not None:
            raise ConfigError(f"--flow is {flow}; it is for vLLM servers (http://)")
    else:
        for name, given in (("--tokenizer", tokenizer), ("--model-name", model_name)):
            if given is not None:
                raise ConfigError(f"{name} is {given}; it applies to kvferry decode nodes (grpc://) only")
        if not prefill:
            raise ConfigError(
                "--prefill is missing; give a vLLM prefill server (http://host:port) or a kvferry prefill node (grpc://host:port)"
            )
    if _are_nodes("--prefill", prefill) and flow is not None:
        raise ConfigError(f"--flow is {flow}; it applies to vLLM prefill servers (http://) only")
    servers = {
        option: tuple(_node_url(option, url) if is_node(url) else _server_url(option, url) for url in urls)
        for option, urls in (("--prefill", prefill), ("--decode", decode))
    }
    _check_different([(option, url) for option, urls in servers.items() for url in urls])
    return RouterSettings(
        prefill=servers["--prefill"],
        decode=servers["--decode"],
        flow=FlowKind.CONCURRENT if flow is None else member(FlowKind, "--flow", flow),
        max_body_bytes=_size("--max-body", max_body),
        max_body_total_bytes=_size("--max-body-total", max_body_total),
        tokenizer=tokenizer,
        model_name=model_name,
        **others,
    )


def _size(option: str, given: str) -> int:
    try:
        size = parse_size(given)
    except ValueError as error:
        raise ConfigError(f"{option} is {given!r}; {error}") from None
    assert isinstance(size, int)  # `parse_size` returns an int for a text
    return size


def is_node(url: str) -> bool:
    """Return whether the URL is of one of kvferry's own nodes."""
    return url.lower().startswith(NODE_SCHEME)


def node_address(url: str) -> str:
    """Return host:port of a node's URL."""
    return url.removeprefix(NODE_SCHEME)


def _are_nodes(option: str, urls: Sequence[str]) -> bool:
    """Return whether the URLs are of nodes. Raises ConfigError if they are of no kind, or of two."""
    for url in urls:
        if not url.lower().startswith(_SCHEMES):
            raise ConfigError(f"{option} is {url!r}; it must begin with http://, https:// or, for a kvferry node, grpc://")
    are_nodes = set(map(is_node, urls))
    if len(are_nodes) > 1:
        raise ConfigError(f"{option} mixes grpc:// and http:// ({', '.join(urls)}); a router has servers of one kind")
    return True in are_nodes


def _server_url(option: str, url: str) -> str:
    """Return the URL with scheme and host in lower case, with a port, and without a slash at its end."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"{option} is {url!r}; it must be like http://host:8000") from None
    if not host or parts.username or parts.password or parts.query or parts.fragment or any(one.isspace() for one in url):
        raise ConfigError(f"{option} is {url!r}; it must be scheme, host, port and perhaps a path, like http://host:8000")
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ConfigError(f"{option} is {url}; give it without /v1")
    default = 443 if parts.scheme == "https" else 80
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}:{port if port is not None else default}{path}"


def _node_url(option: str, url: str) -> str:
    address = url.partition("://")[2].rstrip("/")
    try:
        host, _, port = checked_host_port(address).rpartition(":")
    except ValueError:
        right = "grpc://host:port with a port from 1 to 65535, an IPv6 host in brackets"
        raise ConfigError(f"{option} is {url!r}; it must be {right}") from None
    return f"{NODE_SCHEME}{host.lower()}:{int(port)}"


def _check_different(servers: Sequence[tuple[str, str]]) -> None:
    seen: dict[str, str] = {}
    for option, url in servers:
        if url in seen:
            where = f"{option} twice" if seen[url] == option else f"{seen[url]} and {option}"
            raise ConfigError(f"{url} is given for {where}; name each server once")
        seen[url] = option
