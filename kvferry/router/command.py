"""From the arguments of `kvferry route` to a router that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from kvferry.cli.client_settings import client_security
from kvferry.router.serve import run_router
from kvferry.router.settings import RouterSettings
from transfer.config import LogConfig
from transfer.errors import ConfigError
from transfer.logs import configure_logging

_OPTIONS: Final = {
    "file": "--config",
    "cert": "--tls-cert",
    "key": "--tls-key",
    "ca": "--tls-ca",
    "peer_names": "--peer-name",
    "insecure": "--insecure",
}


def run_route(settings: RouterSettings, *, tls: Mapping[str, Any], log_level: str, log_format: str) -> int:
    """Serve, and return the exit code.

    Args:
        tls: The arguments of `client_security` that the command has, by name.

    Raises:
        ConfigError: An argument is wrong.
    """
    for name, value, allowed in (
        ("--log-level", log_level, ("debug", "info", "warning", "error")),
        ("--log-format", log_format, ("text", "json")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    security = None
    if settings.are_nodes:
        security = client_security("route", *settings.decode, what="--decode", **tls)
    elif settings.are_prefill_nodes:
        security = client_security("route", *settings.prefill, what="--prefill", **tls)
    else:
        for name, value in tls.items():
            if value:
                raise ConfigError(f"{_OPTIONS[name]} is for kvferry's own nodes (grpc://); vLLM servers take http:// or https://")
    configure_logging(
        LogConfig(
            level=cast("Literal['debug', 'info', 'warning', 'error']", log_level),
            format=cast("Literal['text', 'json']", log_format),
        ),
        role="router",
    )
    return asyncio.run(run_router(settings, security))
