"""Command lines and environment of a local cluster's nodes, and the reasons that their logs hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.local_cluster.node import NodeLog
from kvferry.local_cluster.spec import ClusterSpec, TierSpec, child_environment
from transfer.errors import ConfigError


def test_command_lines_carry_every_setting(tmp_path: Path) -> None:
    spec = ClusterSpec(
        prefill=TierSpec(model=tmp_path, tp_size=4, settings={"pool.order": "HND"}),
        decode=TierSpec(model=tmp_path),
        ring_bytes=4096,
    )
    prefill = spec.command("prefill", port=5, prefill_addresses=["h:5"], ready_file=tmp_path / "r")
    decode = spec.command("decode", port=6, prefill_addresses=["h:5"], ready_file=tmp_path / "r")
    assert "parallel.tp_size=4" in prefill and "pool.order=HND" in prefill and "pool.order=NHD" not in prefill
    assert "ring.capacity_bytes=4096" in decode and not any("ring" in part for part in prefill)
    assert decode[decode.index("--prefill-node") + 1] == "h:5" and "--prefill-node" not in prefill
    assert not any("first_device" in part for part in prefill)
    with pytest.raises(ConfigError, match="start_timeout_s is 0"):
        ClusterSpec(prefill=TierSpec(model=tmp_path), decode=TierSpec(model=tmp_path), start_timeout_s=0)


def test_nodes_of_a_tier_use_devices_in_turn(tmp_path: Path) -> None:
    tier = TierSpec(model=tmp_path, settings={"first_device": 7}, first_devices=(2, 3))
    spec = ClusterSpec(prefill=tier, decode=TierSpec(model=tmp_path), num_prefill=3)
    commands = [
        spec.command("prefill", index, port=5, prefill_addresses=[], ready_file=tmp_path / "r")
        for index in range(spec.num_prefill)
    ]
    assert [command[-1] for command in commands] == ["first_device=2", "first_device=3", "first_device=2"]


def test_environment_leaves_out_settings_of_this_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_POOL__PAGE_SIZE", "77")
    assert not any(name.startswith("KVFERRY_") for name in child_environment())


def test_reasons_are_found_in_logs(tmp_path: Path) -> None:
    log = NodeLog(tmp_path / "log")
    assert (log.reason("decode"), log.lines(), log.tail()) == ("it wrote nothing", [], [])
    event = json.dumps({"event": "start_failed", "error": "no room for 5 pages", "level": "error", "rank": 1})
    log.path.write_text(f"Traceback (most recent call last):\n{event}\nlast words\nhalf a li")
    assert log.reason("decode") == "no room for 5 pages"
    assert log.tail(2) == ["error   start_failed error=no room for 5 pages rank=1", "last words"]
    log.path.write_text(f"{event}\ndecode-node: pool.page_size is 0\n")
    assert log.reason("decode") == "pool.page_size is 0"
    assert [one["rank"] for one in log.events("start_failed")] == [1]
