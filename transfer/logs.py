"""Logs: constant events with fields, for people or as JSON.

The library only writes; it installs no handler. A daemon calls `configure_logging()` first. Then every line of its process,
including those of other libraries, names role, rank and incarnation.

Levels: DEBUG per chunk, INFO per peer and process event, WARNING if something healed itself, ERROR if a request failed.
"""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO, get_args

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from transfer.config import LogConfig
from transfer.errors import ConfigError

LEVELS: Final = get_args(LogConfig.model_fields["level"].annotation)
"""Names of the levels, the most verbose first."""

_levels = logging.getLogger()
"""The logger that sets the level of this process's lines. In an engine's process, the root logger is the engine's."""

_PROCESS: Final[dict[str, object]] = {}
"""Fields of every line of this process. A process has one log."""

_QUIET: Final = ("asyncio", "grpc", "urllib3", "aiohttp.access")
"""Loggers of other libraries whose INFO lines do not help an operator."""


def configure_logging(
    config: LogConfig, *, role: str, rank: int | None = None, incarnation: int | None = None, stream: TextIO | None = None
) -> None:
    """Send the process's logs to `stream`. A second call replaces the first.

    Args:
        role: "prefill", "decode" or "router"; bound to every line.
        rank: Rank of a rank process; a leader has none.
        incarnation: This life of the rank group, shown as 0x and 16 hex digits.
        stream: Standard error by default.
    """
    global _levels
    target = stream if stream is not None else sys.stderr
    _levels = logging.getLogger()
    _PROCESS.clear()
    if rank is not None:
        _PROCESS["rank"] = rank
    rename_process(role=role, incarnation=incarnation)

    def bind(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        for name, value in _PROCESS.items():
            event.setdefault(name, value)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        bind,
    ]
    finish: list[Processor]
    if config.format == "json":
        finish = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        finish = [structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared[:-1], structlog.stdlib.ExtraAdder(), bind],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *finish],
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for previous in list(root.handlers):
        root.removeHandler(previous)
    root.addHandler(handler)
    set_log_level(config.level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # modules take their loggers on import, before this runs
    )


def configure_engine_logging(config: LogConfig) -> None:
    """Set level and format of kvferry's lines inside an engine, whose process has its own log.

    Nothing of the engine's log changes. The lines go where structlog writes by default, to standard output. If the process has
    configured structlog itself, its choice stays, and `config` decides only whether lines of every chunk are written.
    """
    global _levels
    _levels = logging.getLogger("kvferry")
    set_log_level(config.level)
    if not structlog.is_configured():
        *shared, for_people = structlog.get_config()["processors"]
        finish: list[Processor] = (
            [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
            if config.format == "json"
            else [for_people]
        )
        structlog.configure(processors=[_drop_below_level, *shared, *finish])


def _drop_below_level(_: WrappedLogger, method: str, event: EventDict) -> EventDict:
    # Not `isEnabledFor`: the engine may disable all loggers that exist, and kvferry would be silent.
    if structlog.processors.NAME_TO_LEVEL[method] < _levels.getEffectiveLevel():
        raise structlog.DropEvent
    return event


def rename_process(*, role: str, incarnation: int | None = None) -> None:
    """Change the role and incarnation of all further lines; arguments as of `configure_logging`."""
    _PROCESS["role"] = role
    if incarnation is not None:
        _PROCESS["incarnation"] = f"{incarnation:#018x}"


def log_level() -> str:
    """Return the minimum level of this process: one of `LEVELS`."""
    return logging.getLevelName(_levels.level).lower()


def is_debug() -> bool:
    """Return whether lines of every chunk are written. Ask first, because to create such a line takes longer."""
    return _levels.getEffectiveLevel() <= logging.DEBUG


def set_log_level(level: str) -> None:
    """Write lines of at least this level from now on. Raise ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(f"level is {level!r:.40}; it must be one of {', '.join(LEVELS)}")
    _levels.setLevel(level.upper())
