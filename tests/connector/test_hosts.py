"""An engine that spans hosts: its ranks find their leader by an address.

`tests/cluster/engines/connector/test_two_hosts.py` has two hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.engines.connector import DECODE, PREFILL
from kvferry.engines.connector_leader import ConnectorLeader
from tests.authority import Authority
from tests.connector.conftest import Start
from tests.connector.instances import Instance, hand_over, target
from tests.connector.test_tls import tls
from tests.free_port import free_port
from transfer.config import ConnectorConfig
from transfer.errors import ConfigError
from transfer.load_config import load_config


@pytest.fixture
def address() -> Iterator[str]:
    with free_port() as port:
        yield f"127.0.0.1:{port}"


def test_ranks_meet_their_leader_by_its_address(start: Start, address: str) -> None:
    source = start(PREFILL, tp_size=2, settings={"leader.address": address})
    decode = target(source)
    hand_over(source, decode, "a")
    decode.close()


def test_with_tls(start: Start, address: str, tmp_path: Path) -> None:
    """The hosts of the engine have a certificate of their tier. `tls.peer_names` has only names of the other tier."""
    authority = Authority()
    prefill = tls(authority.files(tmp_path / "prefill", "prefill.example"), "decode.example")
    decode = tls(authority.files(tmp_path / "decode", "decode.example"), "prefill.example")
    own = {"leader.address": address, "leader.peer_names": ("prefill.example",)}
    source = start(PREFILL, tp_size=2, settings=prefill | own)
    sink = target(source, **decode)
    hand_over(source, sink, "a")
    sink.close()


def test_an_engine_of_another_name_does_not_come(address: str) -> None:
    settings = {"leader.address": address}
    config = load_config(ConnectorConfig, flags={"tls.insecure": 1} | settings)
    leader = ConnectorLeader(config, instance="one", num_ranks=1, sides=DECODE)
    try:
        with pytest.raises(
            ConfigError, match=r"ranks \[0\] of the engine have not connected within 0\.2 s: leader\.address is 127"
        ):
            leader.start(0.2)
    finally:
        leader.close()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"leader.address": "10.0.0.1:7300", "tls.insecure": 2}, r"server\.host is 127\.0\.0\.1, which the other hosts"),
        (
            {"leader.address": "10.0.0.1:7300", "server.host": "10.0.0.2"},
            r"leader\.address is 10\.0\.0\.1:7300",
        ),
        ({"leader.peer_names": "a.example"}, r"peer_names is a\.example and address is missing"),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Instance(PREFILL, settings=settings)


def test_with_tls_the_names_of_the_hosts_are_needed(tmp_path: Path) -> None:
    files = tls(Authority().files(tmp_path, "prefill.example"), "decode.example")
    with pytest.raises(ConfigError, match=r"leader\.peer_names is empty"):
        Instance(PREFILL, settings=files | {"leader.address": "127.0.0.1:7300"})
