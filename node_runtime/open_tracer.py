"""The tracer of a process, if its settings ask for one."""

from __future__ import annotations

from transfer.config import TracingConfig
from transfer.errors import ConfigError
from transfer.tracing import Tracer


def open_tracer(config: TracingConfig, *, role: str, rank: int | None = None) -> Tracer | None:
    """None where tracing is off; nothing of OpenTelemetry is then loaded.

    Raises:
        ConfigError: What it needs is not installed, or a setting of it cannot be used.
    """
    if config.endpoint is None:
        return None
    try:
        from node_runtime.tracing_client import open_otel_tracer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError(f"tracing.endpoint is {config.endpoint}; it needs OpenTelemetry: install kvferry[otel]") from error
    return open_otel_tracer(config, role=role, rank=rank)
