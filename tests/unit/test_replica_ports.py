"""Data-parallel replicas of an engine have one configuration, and each has ports of its own."""

from __future__ import annotations

import pytest

from transfer.config import ConnectorConfig
from transfer.errors import ConfigError
from transfer.load_config import load_config


def config(**ports: object) -> ConnectorConfig:
    return load_config(ConnectorConfig, flags={name.replace("__", "."): value for name, value in ports.items()})


def test_ports_are_higher_by_the_index() -> None:
    third = config(server__port=7100, server__http_port=7180, leader__address="[fd00::1]:7300").for_replica(2, 4)
    assert (third.server.port, third.server.http_port, third.leader.address) == (7102, 7182, "[fd00::1]:7302")


def test_free_ports_stay_free() -> None:
    assert config().for_replica(3, 4) == config()


@pytest.mark.parametrize(
    ("ports", "problem"),
    [
        (
            {"server__port": 7100, "server__http_port": 7103},
            r"server\.port is 7100 and server\.http_port is 7103; 4 .* be 4 or more",
        ),
        ({"server__port": 65533}, r"server\.port is 65533, and 4 .* at most 65532"),
        ({"leader__address": "a:7100", "server__port": 7099}, r"server\.port is 7099 and leader\.address is 7100"),
    ],
)
def test_ports_that_collide_are_refused(ports: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(**ports).for_replica(0, 4)
