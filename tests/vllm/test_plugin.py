"""The plugin, in vLLM's own configuration: connectors by name, and the scheduler of decode sides."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import structlog
import vllm
from vllm.config import KVTransferConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvferry import vllm_plugin
from kvferry.engines.vllm_connector import KvferryConnector
from kvferry.engines.vllm_scheduler import FirstTokenScheduler
from kvferry.engines.vllm_store_connector import KvferryStoreConnector
from kvferry.vllm_plugin import CONNECTOR, SCHEDULER, register

VLLMS = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"


@pytest.fixture(autouse=True)
def _loaded(model: Path) -> None:
    EngineArgs(model=str(model))  # has vLLM load its plugins


def test_vllm_loads_the_plugin_and_finds_connectors_by_name() -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="kvferry")
    assert found.load() is register
    for connector in (KvferryConnector, KvferryStoreConnector):
        config = KVTransferConfig(kv_connector=connector.__name__, kv_role="kv_both")
        assert KVConnectorFactory.get_connector_class(config) is connector
    other = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both", kv_connector_module_path="json")
    assert other.kv_connector_module_path == "json", "a module that the user names stays"
    assert KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both").kv_connector_module_path is None
    completed = VllmConfig.__post_init__, KVTransferConfig.__post_init__
    register()
    assert completed == (VllmConfig.__post_init__, KVTransferConfig.__post_init__), "vLLM calls plugins several times"


@pytest.mark.parametrize(
    ("change", "expected", "reason"),
    [
        ({}, SCHEDULER, ""),
        ({"role": "kv_both"}, SCHEDULER, ""),
        ({"role": "kv_producer"}, None, ""),
        ({"connector": "NixlConnector"}, None, ""),
        ({"connector": None}, None, ""),
        ({"scheduler_cls": VLLMS}, VLLMS, ""),
        ({"async_scheduling": False}, None, "asynchronous scheduling is off; enable it"),
        ({"has_v2": False}, None, "vLLM uses model runner V1"),
        ({"num_drafts": 1}, None, "speculative decoding is on"),
        ({"version": "0.34.0"}, None, "vLLM is 0.34.0"),
    ],
    ids=str,
)
def test_a_decode_side_that_can_use_first_tokens_has_our_scheduler(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], expected: str | None, reason: str
) -> None:
    name = change.get("connector", CONNECTOR)
    transfer = None if name is None else KVTransferConfig(kv_connector=name, kv_role=change.get("role", "kv_consumer"))
    scheduler = SchedulerConfig.default_factory(scheduler_cls=change.get("scheduler_cls"))
    plain = VllmConfig(kv_transfer_config=transfer, scheduler_config=scheduler)
    # vLLM for CPUs is synchronous, and has model runner V1.
    plain.scheduler_config.scheduler_cls = change.get("scheduler_cls")
    plain.scheduler_config.async_scheduling = change.get("async_scheduling", True)
    for field, value in (
        ("use_v2_model_runner", change.get("has_v2", True)),
        ("num_speculative_tokens", change.get("num_drafts", 0)),
    ):
        monkeypatch.setattr(VllmConfig, field, property(lambda self, value=value: value))
    monkeypatch.setattr(vllm, "__version__", change.get("version", vllm.__version__))
    vllm_plugin._say_once.cache_clear()  # noqa: SLF001
    with structlog.testing.capture_logs() as logs:
        vllm_plugin._set_scheduler(plain)  # noqa: SLF001
    assert plain.scheduler_config.scheduler_cls == expected
    assert plain.scheduler_config.get_scheduler_cls() is (FirstTokenScheduler if expected == SCHEDULER else _vllms(plain))
    reasons = [entry["reason"] for entry in logs if entry["event"] == "first_tokens_not_used"]
    assert len(reasons) == bool(reason) and all(found.startswith(reason) for found in reasons)


def _vllms(config: VllmConfig) -> type:
    from vllm.v1.core.sched.scheduler import Scheduler

    return AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler


def test_vllm_asks_for_the_scheduler_when_its_configuration_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_plugin, "why_no_first_tokens", lambda config: "")
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_consumer"))
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert VllmConfig().scheduler_config.scheduler_cls is None


def test_an_error_of_the_plugin_does_not_end_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: VllmConfig) -> str:
        raise AttributeError("another interface")

    monkeypatch.setattr(vllm_plugin, "why_no_first_tokens", fail)
    with structlog.testing.capture_logs() as logs:
        config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_consumer"))
    assert config.scheduler_config.scheduler_cls is None
    assert [(entry["event"], entry["error"]) for entry in logs] == [("vllm_plugin_failed", "AttributeError: another interface")]


def test_an_engine_without_kvferry_keeps_its_environment_and_imports_no_part_of_it() -> None:
    script = """
import os, sys
from vllm.plugins import load_general_plugins
before = dict(os.environ)
load_general_plugins()
from vllm.config import VllmConfig
VllmConfig()
assert os.environ == before, set(os.environ.items()) ^ set(before.items())
found = {name for name in sys.modules if name.split(".")[0] in ("kvferry", "transfer", "node_runtime")}
assert found == {"kvferry", "kvferry.vllm_plugin"}, found
"""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
