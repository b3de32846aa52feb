"""kvferry's settings inside SGLang."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.engines.sglang_settings import CONFIG_FILE, sglang_settings
from transfer.config import ConnectorConfig
from transfer.errors import ConfigError


def settings(environment: dict[str, str]) -> ConnectorConfig:
    return sglang_settings(environment, device="cpu", meet_timeout_s=300.0)


def test_what_is_set_stays(tmp_path: Path) -> None:
    file = tmp_path / "kvferry.yaml"
    file.write_text("limits: {hold_s: 7, prefill_retries: 1}\nheartbeat: {interval_s: 0.25}\n", encoding="utf-8")
    found = settings({CONFIG_FILE: str(file), "KVFERRY_LIMITS__HOLD_S": "9", "KVFERRY_LIMITS__MEET_TIMEOUT_S": "5"})
    assert (found.limits.meet_timeout_s, found.limits.hold_s, found.limits.prefill_retries) == (5.0, 9.0, 1)
    assert found.heartbeat.interval_s == 0.25


def test_operators_and_discovery_are_set_as_on_a_node() -> None:
    found = settings({"KVFERRY_DISCOVERY__FILE": "/nodes", "KVFERRY_TRACING__ENDPOINT": "http://c:4317"})
    assert (str(found.discovery.file), found.tracing.endpoint, found.status_page.enabled) == ("/nodes", "http://c:4317", True)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"KVFERRY_LIMITS__HOLD": "9"}, r"limits\.hold is no setting"),
        ({CONFIG_FILE: "/nowhere.yaml"}, r"config file /nowhere\.yaml cannot be read"),
        ({"KVFERRY_TRANSPORT__NAME": "inproc"}, "inproc"),
    ],
)
def test_what_cannot_be_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(environment)
