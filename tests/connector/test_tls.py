"""Mutual TLS between engines that host a kvferry: who is spoken to, and who is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.engines.connector import DECODE, PREFILL
from tests.authority import Authority, Files
from tests.connector.conftest import Start
from tests.connector.instances import PROMPT, TO, Instance, wait_for
from transfer.errors import ConfigError

PREFILL_NAME, DECODE_NAME = "spiffe://cluster.example/prefill", "decode-0.example"
PREFILL_NAMES = ("prefill-0.example", PREFILL_NAME)  # callers check a node by a DNS name


def tls(files: Files, *peers: str) -> dict[str, Any]:
    return {
        "tls.insecure": 0,
        "tls.cert_file": str(files.cert),
        "tls.key_file": str(files.key),
        "tls.ca_file": str(files.ca),
        "tls.peer_names": peers,
    }


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def source(start: Start, authority: Authority, tmp_path: Path) -> Instance:
    files = authority.files(tmp_path / "source", *PREFILL_NAMES)
    return start(PREFILL, tp_size=2, settings=tls(files, DECODE_NAME))


@pytest.fixture
def decode(start: Start, source: Instance) -> Callable[..., Instance]:
    def begin(files: Files, *peers: str, **settings: Any) -> Instance:
        nodes = {"peers.prefill_nodes": (source.leader.address,)}
        return start(DECODE, settings=tls(files, *peers) | nodes | settings)

    return begin


def assert_refused(source: Instance, decode: Instance, reason: str) -> None:
    [peer] = decode.leader.incoming.nodes.peers
    wait_for(lambda: reason in peer.reason, "it is refused")
    decode.limits.meet_timeout_s = 0.1
    decode.leader.want("b", "t", source.leader.address, PROMPT)
    assert reason in decode.wait_until_failed("b")
    assert source.leader.num_joined == decode.leader.num_joined == 0


def test_both_sides_accept_each_others_certificates(
    source: Instance, decode: Callable[..., Instance], authority: Authority, tmp_path: Path
) -> None:
    """With the certificates of our own nodes' kind: tests/cluster/nodes/test_tls.py has the same names."""
    target = decode(authority.files(tmp_path / "decode", DECODE_NAME), PREFILL_NAME)
    wait_for(target.joined, "joined")
    target.fetches("b", "t", source)
    source.sends("a", "t")
    assert target.settled("b").failure == ""
    target.assert_has(TO, PROMPT)
    assert source.freed("a").failure == ""


def test_a_decode_side_of_the_wrong_name_is_not_let_in(
    source: Instance, decode: Callable[..., Instance], authority: Authority, tmp_path: Path
) -> None:
    target = decode(authority.files(tmp_path / "decode", "decode-9.example"), PREFILL_NAME)
    assert_refused(source, target, "may not call PrefillControl/Join: it is not in tls.peer_names")


def test_a_prefill_side_of_the_wrong_name_is_not_spoken_to(
    source: Instance, decode: Callable[..., Instance], authority: Authority, tmp_path: Path
) -> None:
    target = decode(authority.files(tmp_path / "decode", DECODE_NAME), "spiffe://cluster.example/other")
    assert_refused(source, target, "prefill-0.example answers there, which is not in tls.peer_names")


def test_tls_without_peer_names_is_rejected(start: Start, authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls\.peer_names"):
        start(PREFILL, settings=tls(authority.files(tmp_path / "source", *PREFILL_NAMES)))
