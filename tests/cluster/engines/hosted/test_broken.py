"""Faults after which a process cannot go on with its kvferry; each test has a loop thread of its own, which ends with it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.engines import hosted_rank
from kvferry.engines.hosted import SOURCE
from kvferry.engines.hosted_leader import HostedLeader
from prefill_node.source_rank import SourceRank
from tests.hosted.instances import Instance, wait_for
from tests.hosted.test_reviewed import bare_rank, config, read_http
from transfer.errors import ConfigError, LocalProtocolError

Pair = Callable[..., tuple[Instance, Instance]]


def test_a_rank_breaks_as_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """High: what nobody had foreseen was told to nobody, and the leader waited for its minute."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such memory")

    monkeypatch.setattr(hosted_rank, "own_instance", broken)
    name = secrets.token_hex(8)
    rank = bare_rank(config(), name)
    leader = HostedLeader(config(), instance=name, num_ranks=1, sides=SOURCE)
    try:
        with pytest.raises(ConfigError, match="rank 0 cannot start: unexpected RuntimeError: no such memory"):
            leader.start(timeout_s=20)
        with pytest.raises(LocalProtocolError, match="no such memory"):
            wait_for(lambda: rank.take_news() or None, "the engine is told")
    finally:
        leader.close()
        rank.close()


def test_an_invariant_breaks_on_a_rank(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """High: the task that proves invariants and reports ended without a word."""
    source, _ = pair()

    def broken(_: SourceRank) -> bool:
        raise LocalProtocolError("invariant broken: one and one are three")

    monkeypatch.setattr(SourceRank, "check_idle", broken)
    with pytest.raises(LocalProtocolError, match="one and one are three"):
        wait_for(lambda: source.ranks[0].take_news() or None, "the engine is told")
    assert "503" in read_http(source.leader.http_address, "/readyz")


def test_a_rank_without_a_folder_can_be_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    before = threading.enumerate()
    rank = bare_rank(config(), "nowhere")
    with pytest.raises(LocalProtocolError, match="XDG_RUNTIME_DIR"):
        wait_for(lambda: rank.take_news() or None, "the engine is told")
    rank.close()
    rank.close()
    assert threading.enumerate() == before, "and its thread has ended"
