"""kvferry's settings inside vLLM and SGLang, and the versions of vLLM that the connector accepts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.engines.connector import DECODE, PREFILL
from kvferry.engines.sglang_settings import CONFIG_FILE, SUPPORTED, check_supported, sglang_settings
from kvferry.engines.vllm_settings import (
    api_headers,
    check_version,
    settings_of_replica,
    sides_of,
    store_settings,
    vllm_settings,
)
from transfer.config import ConnectorConfig
from transfer.errors import ConfigError


def test_settings_are_nested_or_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_RING__CAPACITY_BYTES", "1MiB")
    config = vllm_settings({"tls": {"insecure": 1}, "server.port": 7001, "api_url": "http://127.0.0.1:8000"}, device="cuda")
    assert (config.tls.insecure, config.server.port, config.ring.capacity_bytes, config.device) == (1, 7001, 1 << 20, "cuda")


def test_operators_and_discovery_are_set_as_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_LOG__LEVEL", "debug")
    extra = {"discovery": {"kind": "dns", "dns_name": "p:7001"}, "status_page.enabled": False, "tracing.sample_ratio": 0.5}
    config = vllm_settings(extra, device="cpu")
    assert (config.discovery.dns_name, config.status_page.enabled) == ("p:7001", False)
    assert (config.tracing.sample_ratio, config.log.level) == (0.5, "debug")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"ring": {"capacity": "1MiB"}}, "ring.capacity is no setting .from kv_connector_extra_config.*ring.capacity_bytes"),
        ({"transport": {"name": "inproc"}}, "transport.name is inproc"),
        ({"limits": {"max_step_tokens": 7}}, "limits.max_step_tokens is no setting .*of a connector; it is one of prefill-node"),
        ({"chunk": 5}, "chunk is 5 .from kv_connector_extra_config"),
        ({"peers.prefill_nodes": ["p:1"], "discovery.file": "f"}, "peers.prefill_nodes is p:1 and discovery.file is f; set one"),
    ],
)
def test_invalid_settings_are_rejected_with_the_reason(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        vllm_settings(extra, device="cpu")


@pytest.mark.parametrize(("role", "sides"), [("kv_producer", PREFILL), ("kv_consumer", DECODE), ("kv_both", PREFILL | DECODE)])
def test_roles(role: str, sides: object) -> None:
    assert sides_of(role) == sides


@pytest.mark.parametrize("role", [None, "", "producer"])
def test_a_role_that_is_none(role: str | None) -> None:
    with pytest.raises(ConfigError, match="it must be one of kv_producer, kv_consumer, kv_both"):
        sides_of(role)


def parallel(index: int = 0, *, size: int = 1, local: int | None = None, own_balancer: bool = False, hosts: int = 1) -> object:
    """vLLM's ParallelConfig in a process of one data-parallel rank."""
    return SimpleNamespace(
        data_parallel_index=index,
        data_parallel_size=size,
        data_parallel_rank_local=local,
        local_engines_only=own_balancer,
        nnodes_within_dp=hosts,
    )


def test_each_data_parallel_rank_of_vllm_has_its_ports() -> None:
    config = vllm_settings({"server.port": 7100, "server.http_port": 7180}, device="cpu")
    assert settings_of_replica(config, parallel()) == config
    dense = settings_of_replica(config, parallel(3, size=1))  # vLLM sets the size of a dense model's rank to 1
    assert (dense.server.port, dense.server.http_port) == (7103, 7183)
    with pytest.raises(ConfigError, match="128 data-parallel replicas have as many ports"):
        settings_of_replica(config, parallel(0, size=128))


def test_an_engine_on_several_hosts_needs_the_address_of_its_leader() -> None:
    with pytest.raises(ConfigError, match=r"spans 2 hosts \(--nnodes\), and leader\.address is missing"):
        settings_of_replica(vllm_settings({}, device="cpu"), parallel(hosts=2))
    config = vllm_settings({"leader.address": "10.0.0.1:7300"}, device="cpu")
    assert settings_of_replica(config, parallel(1, size=2, hosts=2)).leader.address == "10.0.0.1:7301"


def test_requests_to_vllms_own_api_reach_this_rank() -> None:
    """The header counts all ranks behind vLLM's internal load balancing, otherwise those of this API server."""
    assert api_headers(parallel()) == {}
    assert api_headers(parallel(5, size=8, local=1)) == {"X-data-parallel-rank": "5"}
    assert api_headers(parallel(5, size=8, local=1, own_balancer=True)) == {"X-data-parallel-rank": "1"}


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+g123", "0.33.0", "0.33.5rc1"])
def test_versions_that_it_was_made_for(version: str) -> None:
    check_version(version, allow_untested=False)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_unless_they_are_allowed(version: str) -> None:
    with pytest.raises(ConfigError, match=r"vLLM is .*; this connector was written for 0.32 to 0.33: .* allow_untested_vllm"):
        check_version(version, allow_untested=False)
    check_version(version, allow_untested=True)


def in_sglang(environment: dict[str, str]) -> ConnectorConfig:
    return sglang_settings(environment, device="cpu", meet_timeout_s=300.0)


def test_settings_of_sglang_override_those_that_fit_it(tmp_path: Path) -> None:
    file = tmp_path / "kvferry.yaml"
    file.write_text("limits: {hold_s: 7, prefill_retries: 1}\nheartbeat: {interval_s: 0.25}\n", encoding="utf-8")
    found = in_sglang({CONFIG_FILE: str(file), "KVFERRY_LIMITS__HOLD_S": "9", "KVFERRY_LIMITS__MEET_TIMEOUT_S": "5"})
    assert (found.limits.meet_timeout_s, found.limits.hold_s, found.limits.prefill_retries) == (5.0, 9.0, 1)
    assert found.heartbeat.interval_s == 0.25


def test_operators_and_discovery_are_set_in_sglang_as_on_a_node() -> None:
    found = in_sglang({"KVFERRY_DISCOVERY__FILE": "/nodes", "KVFERRY_TRACING__ENDPOINT": "http://c:4317"})
    assert (str(found.discovery.file), found.tracing.endpoint, found.status_page.enabled) == ("/nodes", "http://c:4317", True)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"KVFERRY_LIMITS__HOLD": "9"}, r"limits\.hold is no setting"),
        ({CONFIG_FILE: "/nowhere.yaml"}, r"config file /nowhere\.yaml cannot be read"),
        ({"KVFERRY_TRANSPORT__NAME": "inproc"}, "inproc"),
    ],
)
def test_invalid_settings_in_sglang_are_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        in_sglang(environment)


def test_settings_of_an_sglang_engine_that_cannot_be_used() -> None:
    check_supported(SUPPORTED)
    with pytest.raises(ConfigError, match="nnodes is 2; with --disaggregation-transfer-backend kvferry it must be 1"):
        check_supported({**SUPPORTED, "nnodes": 2})


def test_store_settings_have_the_names_of_node_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_STORAGE__MAX_BYTES", "1GB")
    monkeypatch.setenv("KVFERRY_LOG__LEVEL", "debug")
    config = store_settings({"storage": {"directory": "/srv/kv"}, "offload.host_memory": "64MiB", "page_blocks": 4})
    assert (config.storage.directory, config.storage.max_bytes) == (Path("/srv/kv"), 10**9)
    assert (config.offload.host_memory, config.page_blocks, config.log.level) == (64 << 20, 4, "debug")


def test_each_connector_of_an_instance_reads_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_STORAGE__DIRECTORY", "/srv/kv")
    monkeypatch.setenv("KVFERRY_OFFLOAD__HOST_RATIO", "2")
    monkeypatch.setenv("KVFERRY_SERVER__PORT", "7001")
    store = store_settings({})
    assert (store.storage.directory, store.offload.host_ratio) == (Path("/srv/kv"), 2)
    assert vllm_settings({}, device="cpu").server.port == 7001


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"offload.host_memory": 1}, "storage.directory and storage.url are null; set one of them"),
        ({"storage.directory": "/srv/kv"}, "offload.host_ratio and offload.host_memory are null.*set one"),
        ({"storage.directory": "/srv/kv", "offload": {"host_ratio": 1, "host_memory": 1}}, "host_ratio is 1.* set one of them"),
        (
            {"storage.directory": "/srv/kv", "offload.buffer_bytes": 1},
            "buffer_bytes is no setting .*of a store connector",
        ),
        ({"storage.directory": "/srv/kv", "page_blocks": 0}, "page_blocks is 0 .*; it must be at least 1"),
    ],
)
def test_an_invalid_store_setting_is_named(extra: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        store_settings(extra)
