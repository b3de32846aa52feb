"""Pure core, thin edges: who may import what. CONTRIBUTING.md explains the rule; the tables below are the rule.

Every import counts, also one inside a function or under TYPE_CHECKING. A pattern's `*` matches slashes too.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Which of our packages each of our packages may import, itself apart.
PACKAGES: dict[str, set[str]] = {
    "transfer": set(),
    "node_runtime": {"transfer"},
    "embedded_engine": {"transfer"},
    "prefill_node": {"transfer", "node_runtime", "embedded_engine"},
    "decode_node": {"transfer", "node_runtime", "embedded_engine"},
    "kvferry": {"transfer", "node_runtime", "embedded_engine", "prefill_node", "decode_node"},
    "deploy": set(),
}

# What the memory plan is made of: layer 0, so that a plan can be made where there is neither torch nor transformers.
MEMORY_PLAN = tuple(f"transfer/memory/{name}.py" for name in ("__init__", "config_fields", "model_*", "plan*", "workspace"))
# How pages are named and lie outside of the pools, and what a store of them can do.
STORED_PAGES = tuple(f"transfer/storage/{name}.py" for name in ("__init__", "base", "halving", "keys", "pages"))
# What the decode leader knows of host pages, and what it goes by.
HOST_PAGES = tuple(f"decode_node/offload/{name}.py" for name in ("device_index", "host_tier", "jobs", "rules", "tiered_request"))
# Layer 0: standard library and each other; nothing of the outer world.
L0 = (
    "transfer/__init__.py",
    "transfer/errors.py",
    "transfer/peer_names.py",
    "transfer/layout.py",
    "transfer/layer_groups.py",
    "transfer/chunk.py",
    "transfer/ring.py",
    "transfer/ring_index.py",
    "transfer/page_allocator.py",
    "transfer/instance.py",
    "transfer/engine_types.py",
    "transfer/breaker.py",
    "transfer/utf8.py",
    *STORED_PAGES,
    *HOST_PAGES,
    "transfer/transport/base.py",
    "transfer/control/base.py",
    *MEMORY_PLAN,
)
# Layer 1: also the small libraries of L1_LIBRARIES.
L1 = (
    "transfer/config/*",
    "transfer/load_config.py",
    "transfer/plain_text.py",
    "transfer/role_settings.py",
    "transfer/messages.py",
    "transfer/metrics/*",
    "transfer/logs.py",
    "transfer/tracing.py",
    "transfer/digest.py",
    "transfer/storage/envelope.py",
)
L1_LIBRARIES = {"msgpack", "prometheus_client", "pydantic", "pydantic_settings", "structlog", "xxhash", "yaml"}
# State machines: layer 0, the messages, and nothing else.
SANS_IO = (
    *(f"prefill_node/sender{part}.py" for part in ("", "_events", "_state")),
    *(f"decode_node/receiver{part}.py" for part in ("", "_events", "_state")),
)
SANS_IO_MAY_IMPORT = (*L0, "transfer/messages.py", *SANS_IO)

# Logic has no clock, no chance, no threads, no sockets, no environment: those come to it as arguments and events. (The other
# files of layer 0 are interfaces; they may name an event loop in a signature.)
LOGIC = (
    "transfer/layout.py", "transfer/layer_groups.py", "transfer/chunk.py", "transfer/ring.py",
    "transfer/ring_index.py", "transfer/page_allocator.py", "transfer/breaker.py",
    "decode_node/placement.py", "prefill_node/scheduler.py", "prefill_node/stored_prefix.py", "prefill_node/prefix_pages.py",
    *STORED_PAGES, *HOST_PAGES, *MEMORY_PLAN, *SANS_IO,
)  # fmt: skip
IMPURE_STDLIB = {
    "asyncio", "concurrent", "datetime", "multiprocessing", "os", "queue", "random", "secrets", "select", "selectors", "signal",
    "socket", "subprocess", "threading", "time", "uuid",
}  # fmt: skip

NODES = ("node_runtime/*", "embedded_engine/*", "prefill_node/*", "decode_node/*", "kvferry/*")
GRPC_FILES = (
    "transfer/registry/*", "prefill_node/node.py", "decode_node/node.py", "decode_node/peers.py",
    "decode_node/prefill_peer.py",
    *(f"{node}/{name}" for node in ("node_runtime", "prefill_node", "decode_node", "kvferry")
      for name in ("*_service.py", "*client.py", "*_server.py")),
)  # fmt: skip
DEVICE_FILES = (
    "transfer/kv_pool.py", "transfer/host_pool.py", "transfer/staging.py", "transfer/out_of_memory.py",
    "transfer/kernels/*", "transfer/memory/*", "transfer/transport/*", *NODES,
)  # fmt: skip
CLI_FILES = ("kvferry/*", "node_runtime/*", "prefill_node/__main__.py", "decode_node/__main__.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A library of others: the distribution that pyproject.toml must declare, and the files that may import it."""

    distribution: str
    allowed: tuple[str, ...]


FOREIGN: dict[str, Foreign] = {
    "aetcd": Foreign(distribution="aetcd", allowed=("transfer/registry/discovery/etcd_client.py",)),
    "aiohttp": Foreign(distribution="aiohttp", allowed=("node_runtime/*", "kvferry/*")),
    "cuda": Foreign(distribution="cuda-bindings", allowed=("transfer/transport/cuda_ipc_driver.py",)),
    "google": Foreign(distribution="protobuf", allowed=GRPC_FILES),
    "grafana_foundation_sdk": Foreign(distribution="grafana-foundation-sdk", allowed=("deploy/monitoring/grafana.py",)),
    "grpc": Foreign(distribution="grpcio", allowed=GRPC_FILES),
    "grpc_health": Foreign(distribution="grpcio-health-checking", allowed=GRPC_FILES),
    "grpc_reflection": Foreign(distribution="grpcio-reflection", allowed=GRPC_FILES),
    "grpc_status": Foreign(distribution="grpcio-status", allowed=GRPC_FILES),
    "matplotlib": Foreign(
        distribution="matplotlib",
        allowed=("deploy/monitoring/pictures.py", "kvferry/plan_picture.py", "kvferry/bench_serve/picture.py"),
    ),
    "msgpack": Foreign(distribution="msgpack", allowed=("transfer/messages.py", "transfer/transport/*", "node_runtime/*")),
    "nixl_cu12": Foreign(distribution="nixl-cu12", allowed=("transfer/transport/nixl_library.py",)),
    "nixl_cu13": Foreign(distribution="nixl-cu13", allowed=("transfer/transport/nixl_library.py",)),
    "numpy": Foreign(distribution="numpy", allowed=(*DEVICE_FILES, "transfer/digest.py")),
    "obstore": Foreign(distribution="obstore", allowed=("transfer/storage/object_store.py",)),
    "opentelemetry": Foreign(distribution="opentelemetry-sdk", allowed=("node_runtime/tracing_client.py",)),
    "prometheus_client": Foreign(
        distribution="prometheus-client",
        allowed=("node_runtime/*", "kvferry/*"),
    ),
    "pydantic": Foreign(
        distribution="pydantic",
        allowed=(
            "transfer/messages.py",
            "transfer/config/*",
            "transfer/load_config.py",
            "node_runtime/*link*.py",
            "kvferry/engines/*_settings.py",
        ),
    ),
    "pydantic_settings": Foreign(distribution="pydantic-settings", allowed=("*config.py",)),
    "rich": Foreign(distribution="rich", allowed=CLI_FILES),
    "safetensors": Foreign(distribution="safetensors", allowed=("embedded_engine/*", "kvferry/*")),
    "structlog": Foreign(distribution="structlog", allowed=("transfer/*", *NODES)),
    "textual": Foreign(distribution="textual", allowed=("kvferry/top_app.py",)),
    "tokenizers": Foreign(distribution="tokenizers", allowed=("embedded_engine/*", "decode_node/text.py", "kvferry/*")),
    "torch": Foreign(distribution="torch", allowed=DEVICE_FILES),
    "transformers": Foreign(distribution="transformers", allowed=("embedded_engine/*", "kvferry/*")),
    "triton": Foreign(distribution="triton", allowed=("transfer/kernels/*", "embedded_engine/kernels/*")),
    "typer": Foreign(distribution="typer", allowed=CLI_FILES),
    "ucxx": Foreign(
        distribution="ucxx-cu13", allowed=("transfer/transport/ucx.py", "transfer/transport/ucx_*.py", "kvferry/doctor.py")
    ),
    "xxhash": Foreign(
        distribution="xxhash",
        allowed=("transfer/digest.py", "transfer/storage/envelope.py", "transfer/transport/*", "transfer/kernels/*", *NODES),
    ),
    "yaml": Foreign(
        distribution="pyyaml",
        allowed=("*config.py", "transfer/registry/discovery/node_file.py", "kvferry/*", "deploy/monitoring/rule_file.py"),
    ),
    "zmq": Foreign(distribution="pyzmq", allowed=("transfer/control/zmq_*.py", "node_runtime/*link*.py")),
}

# Engines that load kvferry, each in an environment of its own: no dependencies of ours. Which files may import them.
HOSTS: dict[str, tuple[str, ...]] = {
    "sglang": ("kvferry/engines/sglang_*.py",),
    "vllm": ("kvferry/engines/vllm_*.py",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module (dotted, absolute) and the line that imports it."""

    module: str
    line: int


def _is_one_of(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def _file_of(module: str) -> str:
    """Path that a dotted module of ours would have, relative to the root."""
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"


def imports_of(path: str, source: str) -> Iterator[Import]:
    """All modules that the source of `path` imports; `from package import name` counts as the submodule where there is one."""
    package = list(Path(path).parent.parts)
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            yield from (Import(module=alias.name, line=node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{module}.{alias.name}"
                exists = (ROOT / _file_of(submodule)).exists()
                yield Import(module=submodule if exists else module, line=node.lineno)


def violations(path: str, source: str) -> Iterator[str]:
    """One line per import of `path` that breaks the rule."""
    own = Path(path).parts[0]
    is_pure = _is_one_of(path, L0) or _is_one_of(path, SANS_IO)
    for found in imports_of(path, source):
        top = found.module.partition(".")[0]
        reason = None
        if top == own or top in PACKAGES:
            reason = _why_not_ours(path, own, found.module, top)
        elif top in sys.stdlib_module_names:
            if _is_one_of(path, LOGIC) and top in IMPURE_STDLIB:
                reason = "logic has no clock, chance, threads, sockets or environment"
        elif is_pure:
            reason = "pure code imports no other library"
        elif _is_one_of(path, L1) and top not in L1_LIBRARIES | {"numpy"}:
            reason = f"layer 1 may import {', '.join(sorted(L1_LIBRARIES))}"
        elif top in HOSTS:
            if not _is_one_of(path, HOSTS[top]):
                reason = f"only these may: {', '.join(HOSTS[top])}"
        elif top not in FOREIGN:
            reason = "not in the table FOREIGN of this test: decide which files may import it, and declare it in pyproject.toml"
        elif not _is_one_of(path, FOREIGN[top].allowed):
            reason = f"only these may: {', '.join(FOREIGN[top].allowed)}"
        if reason is not None:
            yield f"{path}:{found.line} imports {found.module}: {reason}"


def _why_not_ours(path: str, own: str, module: str, top: str) -> str | None:
    if top != own and top not in PACKAGES[own]:
        return f"{own} may import only {', '.join(sorted(PACKAGES[own])) or 'itself'} of our packages"
    target = _file_of(module)
    if _is_one_of(path, SANS_IO) and not _is_one_of(target, SANS_IO_MAY_IMPORT):
        return "a state machine may import layer 0 and transfer.messages"
    if _is_one_of(path, L0) and not _is_one_of(target, L0):
        return "layer 0 may import layer 0"
    if _is_one_of(path, L1) and not _is_one_of(target, (*L0, *L1)):
        return "layer 1 may import layers 0 and 1"
    return None


def _our_files() -> list[str]:
    found = (file.relative_to(ROOT).as_posix() for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return sorted(file for file in found if not file.startswith("transfer/pb/"))


def test_every_file_keeps_the_dependency_rule() -> None:
    files = _our_files()
    assert {"transfer/layout.py", "decode_node/receiver.py", "kvferry/router/metrics.py"} <= set(files)
    broken = [line for path in files for line in violations(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("transfer/ring.py", "import bisect\nfrom transfer.errors import ConfigError", None),
        ("transfer/ring.py", "def f():\n    import torch", "pure code imports no other library"),
        ("transfer/ring.py", "import time", "logic has no clock"),
        ("transfer/ring.py", "from transfer import messages", "layer 0 may import layer 0"),
        ("transfer/transport/base.py", "from .inproc import InprocTransport", "layer 0 may import layer 0"),
        ("transfer/messages.py", "import torch", "layer 1 may import msgpack"),
        ("transfer/messages.py", "from transfer.transport.ucx import UcxTransport", "layer 1 may import layers 0 and 1"),
        ("prefill_node/sender.py", "from transfer.config import Settings", "a state machine may import"),
        ("prefill_node/node.py", "import decode_node.receiver", "prefill_node may import only"),
        ("embedded_engine/paged_attention.py", "import triton", "only these may"),
        ("transfer/kv_pool.py", "import requests", "not in the table FOREIGN"),
        ("kvferry/engines/model_identity.py", "import vllm", "only these may"),
    ],
)
def test_a_planted_violation_is_reported(path: str, source: str, reason: str | None) -> None:
    found = list(violations(path, source))
    assert [reason in line for line in found] == [True] if reason else not found


def test_every_foreign_library_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower() for requirement in requirements}
    assert {foreign.distribution for foreign in FOREIGN.values()} <= declared


def test_wire_contracts_hold_no_python() -> None:
    """`proto` must stay importable only as proto-plus's package."""
    assert not list((ROOT / "proto").rglob("*.py"))
