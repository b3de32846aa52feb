"""The plugin, in vLLM's own configuration: the connector by its name alone, and the scheduler of decode sides."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import structlog
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler

from kvferry.engines import vllm_plugin
from kvferry.engines.vllm_connector import KvferryConnector
from kvferry.engines.vllm_plugin import CONNECTOR, SCHEDULER, has_first_tokens, register
from kvferry.engines.vllm_scheduler import FirstTokenScheduler


def config_of(model: Path, transfer: dict[str, Any] | None, **options: Any) -> VllmConfig:
    if transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    return EngineArgs(model=str(model), dtype="float32", max_model_len=1024, **options).create_engine_config()


def test_vllm_loads_the_plugin_and_finds_the_connector_by_name(model: Path) -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="kvferry")
    assert found.load() is register
    config = config_of(model, {"kv_connector": CONNECTOR, "kv_role": "kv_consumer"})
    assert config.kv_transfer_config is not None
    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is KvferryConnector
    assert KVConnectorFactory.supports_hma_config(config.kv_transfer_config)
    complete = VllmConfig.__post_init__
    register()
    assert VllmConfig.__post_init__ is complete, "vLLM calls plugins several times"


@pytest.mark.parametrize(
    ("change", "is_expected"),
    [
        ({}, True),
        ({"role": "kv_both"}, True),
        ({"role": "kv_producer"}, False),
        ({"connector": "NixlConnector"}, False),
        ({"connector": None}, False),
        ({"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler"}, False),
        ({"async_scheduling": False}, False),
        ({"has_v2": False}, False),
        ({"num_drafts": 1}, False),
        ({"version": "0.34.0"}, False),
    ],
    ids=str,
)
def test_engines_that_can_use_first_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], is_expected: bool
) -> None:
    name = change.get("connector", CONNECTOR)
    transfer = None if name is None else {"kv_connector": name, "kv_role": change.get("role", "kv_consumer")}
    config = config_of(model, transfer)
    assert not has_first_tokens(config), "on CPUs, vLLM has model runner V1 and is synchronous"
    # Not before: vLLM refuses a configuration with that runner and without Triton.
    config.scheduler_config.scheduler_cls = change.get("scheduler_cls")
    config.scheduler_config.async_scheduling = change.get("async_scheduling", True)
    for name, value in (
        ("use_v2_model_runner", change.get("has_v2", True)),
        ("num_speculative_tokens", change.get("num_drafts", 0)),
    ):
        monkeypatch.setattr(VllmConfig, name, property(lambda self, value=value: value))
    monkeypatch.setattr(vllm, "__version__", change.get("version", vllm.__version__))
    assert has_first_tokens(config) is is_expected


def test_such_an_engine_has_our_scheduler(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_consumer"}
    assert config_of(model, transfer).scheduler_config.get_scheduler_cls() is Scheduler
    monkeypatch.setattr(vllm_plugin, "has_first_tokens", lambda config: config.kv_transfer_config is not None)
    config = config_of(model, transfer)
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.scheduler_config.get_scheduler_cls() is FirstTokenScheduler
    assert config_of(model, None).scheduler_config.get_scheduler_cls() is Scheduler


def test_an_error_of_the_plugin_does_not_end_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("another interface")

    monkeypatch.setattr(KVConnectorFactory, "register_connector", fail)
    with structlog.testing.capture_logs() as logs:
        register()
    assert [(entry["event"], entry["error"]) for entry in logs] == [("vllm_plugin_failed", "RuntimeError: another interface")]
