"""The installed vLLM has the interfaces that kvferry's connectors were written for."""

from __future__ import annotations

import json
import subprocess
import sys

import kvferry.engines.vllm_versions as versions


def test_the_installed_vllm_is_the_recorded_one() -> None:
    command = [sys.executable, "-m", versions.__name__]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.endswith(f": 0 differences from {versions.read_recorded()['vllm']}\n")


def test_sleep_mode_is_refused() -> None:
    """vLLM 0.33 asks before it starts, and takes a connector without this method for one that supports it."""
    from kvferry.engines.vllm_connector import KvferryConnector

    assert not KvferryConnector.supports_sleep_mode(None)


def test_a_hook_that_was_added_to_vllm_is_listed() -> None:
    """As with a newer vLLM: the record lacks a method, a field and a class that are installed."""
    recorded = dict(versions.read_recorded()["interface"])
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.on_new_request"
    specs = "vllm.v1.kv_cache_interface:MambaSpec"
    for name in [base, *(name for name in recorded if name.partition(".page_size_padded")[0].startswith(specs))]:
        del recorded[name]
    lines = list(versions.differences(recorded, versions.installed_interface()))
    assert f"+ {base}: method(self, request)" in lines
    assert f"+ {specs}: class" in lines
    assert all(line.startswith(f"+ {specs}") or line.startswith(f"+ {base}:") for line in lines), json.dumps(lines)
