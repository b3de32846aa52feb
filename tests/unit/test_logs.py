"""Logs: every line of a daemon's process is of one form, and a library writes none by itself."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from transfer.config import LogConfig
from transfer.logs import configure_engine_logging, configure_logging, is_debug, log_level


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


OURS = ("a", "b", "node.early", "node.late", "some.library")


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """Those of these tests' own loggers: all others of the process write there too, from whatever thread."""
    return [line for line in map(json.loads, stream.getvalue().splitlines()) if line["logger"] in OURS]


def test_every_line_is_json_and_says_who_wrote_it() -> None:
    early = structlog.get_logger("node.early")  # as modules do, before anything is configured
    stream = io.StringIO()
    configure_logging(LogConfig(format="json"), role="decode", rank=1, incarnation=0xABC, stream=stream)
    early.info("session_opened", session=7)
    structlog.get_logger("node.late").warning("session_lost", reason="heartbeats missed")
    logging.getLogger("some.library").warning("disk %s is full", "sda", extra={"free_bytes": 0})
    first, second, third = lines(stream)
    for line in (first, second, third):
        assert (line["role"], line["rank"], line["incarnation"]) == ("decode", 1, "0x0000000000000abc")
        assert line["timestamp"].endswith("Z")
    assert (first["event"], first["session"], first["level"], first["logger"]) == ("session_opened", 7, "info", "node.early")
    assert (second["event"], second["reason"], second["level"]) == ("session_lost", "heartbeats missed", "warning")
    assert (third["event"], third["free_bytes"], third["logger"]) == ("disk sda is full", 0, "some.library")


def test_an_exception_stays_one_json_line() -> None:
    stream = io.StringIO()
    configure_logging(LogConfig(format="json"), role="prefill", stream=stream)
    try:
        raise ValueError("the cause")
    except ValueError:
        structlog.get_logger("a").exception("step_failed", value=set)
        logging.getLogger("b").exception("also failed")
    assert len(lines(stream)) == 2
    for line in lines(stream):
        assert "ValueError: the cause" in line["exception"]
        assert "rank" not in line and "incarnation" not in line
    assert lines(stream)[0]["value"] == "<class 'set'>", "JSON has no such value"


def test_text_is_one_line_with_the_fields() -> None:
    stream = io.StringIO()
    configure_logging(LogConfig(), role="decode", rank=0, stream=stream)
    structlog.get_logger("a").info("rank_ready", pool_pages=64)
    logging.getLogger("b").error("of a library")
    first, second = [line for line in stream.getvalue().splitlines() if "[a]" in line or "[b]" in line]
    assert "rank_ready" in first and "pool_pages=64" in first and "role=decode" in first and "rank=0" in first
    assert "of a library" in second and "role=decode" in second
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_holds_for_both_kinds_of_logger(level: Any, count: int) -> None:
    for logger in (structlog.get_logger("a"), logging.getLogger("b")):
        stream = io.StringIO()
        configure_logging(LogConfig(level=level, format="json"), role="decode", stream=stream)
        logger.debug("x")
        logger.info("x")
        logger.warning("x")
        logger.error("x")
        assert len(lines(stream)) == count


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("warning", 2)])
def test_in_an_engine_the_level_applies_only_to_kvferrys_lines(
    capsys: pytest.CaptureFixture[str], level: Any, count: int
) -> None:
    structlog.reset_defaults()
    before = logging.getLogger().level, list(logging.getLogger().handlers)
    configure_engine_logging(LogConfig(level=level, format="json"))
    logger = structlog.get_logger("a")
    for write in (logger.debug, logger.info, logger.warning, logger.error):
        write("x", session=7)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == count and all(line["event"] == "x" and line["session"] == 7 for line in found)
    assert (log_level(), is_debug()) == (level, level == "debug")
    assert (logging.getLogger().level, logging.getLogger().handlers) == before


def test_the_library_installs_no_handler() -> None:
    code = (
        "import logging, structlog\n"
        "import transfer, transfer.logs, transfer.metrics, transfer.control.zmq_channel, transfer.registry.server\n"
        "assert logging.getLogger().handlers == [], logging.getLogger().handlers\n"
        "assert not structlog.is_configured()\n"
        "ours = [name for name in logging.root.manager.loggerDict if name.startswith('transfer')]\n"
        "assert all(not logging.getLogger(name).handlers for name in ours)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
