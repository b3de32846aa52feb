"""vLLM instances with the kvferry connector, and what they say of themselves."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

from tests.samples import sample
from tests.vllm.servers import Server

HEARTBEAT_S = 2.0
"""Twice the default: on two cores that run five processes which look for work without a pause, a heartbeat can be 1 s late."""

READY = re.compile(r"kvferry_ready .*?address=(\S+) http=(\S+)")


def connector(role: str, settings: Mapping[str, Any] | None = None, *, policy: str = "recompute") -> dict[str, Any]:
    """`--kv-transfer-config` of an instance.

    Args:
        role: "kv_producer", "kv_consumer" or "kv_both".
        settings: Of kvferry.
        policy: What vLLM does with a prompt whose KV did not come: "recompute" or "fail".
    """
    common: dict[str, Any] = {"tls": {"insecure": 1}, "heartbeat": {"interval_s": HEARTBEAT_S}, "limits": {"meet_timeout_s": 30}}
    return {
        "kv_connector": "KvferryConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": common | dict(settings or {}),
    }


def page(url: str) -> str:
    """What a GET of the URL is answered with."""
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        text: str = answer.read().decode()
        return text


def kvferry_addresses(server: Server) -> tuple[str, str]:
    """host:port of the gRPC API, and of the HTTP endpoints, of the kvferry that the server hosts."""
    ready = READY.findall(server.log.read_text(encoding="utf-8", errors="replace"))
    assert ready, f"{server.name} has not said that its kvferry is ready"
    address, http_address = ready[-1]
    return address, http_address


def kvferry_metrics(server: Server) -> str:
    """Of the kvferry that the server hosts."""
    return page(f"http://{kvferry_addresses(server)[1]}/metrics")


def what_is_left(server: Server) -> dict[str, float]:
    """What the instance holds of requests, in vLLM and in kvferry; empty where that is nothing."""
    vllm, kvferry = page(f"{server.url}/metrics"), kvferry_metrics(server)
    counts = {
        name: sample(vllm, name)
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    }
    names = ("kvferry_rank_requests", "kvferry_ring_live_bytes", "kvferry_ring_live_grants", "kvferry_staging_slots_used")
    counts |= {name: sample(kvferry, name) for name in names}
    return {name: value for name, value in counts.items() if value}


def assert_nothing_is_left(*servers: Server, timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    left: dict[str, dict[str, float]] = {}
    while time.monotonic() < deadline_s:
        left = {server.name: found for server in servers if (found := what_is_left(server))}
        if not left:
            return
        time.sleep(0.2)
    raise AssertionError(f"still there after {timeout_s:g} s: {left}")
