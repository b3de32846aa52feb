"""Each file imports only the modules that the dependency rule allows. CONTRIBUTING.md explains the rule.

The tables below define the rule. Imports inside functions and under TYPE_CHECKING count, too. `*` in a pattern also matches
slashes.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Packages that each package may import, besides itself.
PACKAGES: dict[str, set[str]] = {
    "transfer": set(),
    "planner": {"transfer"},
    "node_runtime": {"transfer", "planner"},
    "embedded_engine": {"transfer", "planner"},
    "prefill_node": {"transfer", "planner", "node_runtime", "embedded_engine"},
    "decode_node": {"transfer", "planner", "node_runtime", "embedded_engine"},
    "kvferry": {"transfer", "planner", "node_runtime", "embedded_engine", "prefill_node", "decode_node"},
    "deploy": set(),
}


def _files(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names.split())


# The memory plan. It is in layer 0, so that it works without torch and transformers.
MEMORY_PLAN = _files("planner", "__init__ config_fields model_* plan* workspace")
# Names and formats of stored pages, and the interface of a store.
STORED_PAGES = _files("transfer/storage", "__init__ base halving keys pages")
# The decode leader's state and rules of host pages.
HOST_PAGES = _files("decode_node/offload", "host_tier jobs rules tiered_request")
# Layer 0: imports the standard library and layer 0 only.
L0 = (
    *_files("transfer", "__init__ errors peer_names layout layer_groups chunk ring ring_index instance pool/page_allocator"),
    *_files("transfer", "piece engine_types breaker utf8 host_memory control/base send/staging_arena"),
    *_files("transfer/transport", "base signals"),
    "decode_node/ngram.py", *STORED_PAGES, *HOST_PAGES, *MEMORY_PLAN,
)  # fmt: skip
# Layer 1: also imports the small libraries in L1_LIBRARIES.
L1 = (
    *_files("transfer", "config/* load_config plain_text role_settings messages metrics/* logs tracing"),
    "transfer/storage/envelope.py",
)
L1_LIBRARIES = {"msgpack", "prometheus_client", "pydantic", "structlog", "xxhash", "yaml"}
# State machines: import layer 0, the messages and each other only.
SANS_IO = (
    "transfer/session_events.py",
    *_files("transfer/send", "sender events state"),
    *_files("transfer/receive", "receiver events state"),
)
SANS_IO_MAY_IMPORT = (*L0, "transfer/messages.py", *SANS_IO)

# Logic uses no clock, random numbers, threads, sockets or environment: it receives their values as arguments and events.
# (The other files of layer 0 are interfaces, and their signatures may name an event loop.)
LOGIC = (
    *_files("transfer", "layout layer_groups chunk piece piece_size ring ring_index pool/page_allocator breaker"),
    *_files("prefill_node", "scheduler stored_prefix"),
    *_files("decode_node", "ngram offload/page_placement offload/sizes"),
    *_files("transfer/connector", "prefill_routing messages"),
    *STORED_PAGES, *HOST_PAGES, *MEMORY_PLAN, *SANS_IO,
)  # fmt: skip
IMPURE_STDLIB = {
    "asyncio", "concurrent", "datetime", "multiprocessing", "os", "queue", "random", "secrets", "select", "selectors", "signal",
    "socket", "subprocess", "threading", "time", "uuid",
}  # fmt: skip

NODES = ("node_runtime/*", "embedded_engine/*", "prefill_node/*", "decode_node/*", "kvferry/*")
GRPC_FILES = (
    "transfer/registry/*", "prefill_node/node.py", "decode_node/node.py", "transfer/connector/prefill_nodes.py",
    "transfer/connector/prefill_peer.py", "transfer/connector/prefill_calls.py", "transfer/connector/decode_instances.py",
    *(f"{node}/{name}" for node in ("transfer/connector", "node_runtime", "prefill_node", "decode_node", "kvferry")
      for name in ("*_service.py", "*client.py", "*_server.py")),
)  # fmt: skip
DEVICE_FILES = (
    *_files("transfer", "out_of_memory rank_context send/attach send/loop receive/attach receive/loop"),
    "transfer/pool/*", "transfer/copy/*", "transfer/transport/*", *NODES,
)  # fmt: skip
CLI_FILES = ("kvferry/*", "node_runtime/*", "prefill_node/command.py", "decode_node/command.py")


# External libraries: the distribution that pyproject.toml must declare, and the files that may import it.
FOREIGN: dict[str, tuple[str, tuple[str, ...]]] = {
    "aetcd": ("aetcd", ("transfer/registry/discovery/etcd_client.py",)),
    "aiohttp": ("aiohttp", ("node_runtime/*", "kvferry/*")),
    "orjson": ("orjson", ("kvferry/router/*",)),
    "cuda": ("cuda-bindings", ("transfer/transport/cuda_ipc_driver.py",)),
    "google": ("protobuf", GRPC_FILES),
    "grafana_foundation_sdk": ("grafana-foundation-sdk", ("deploy/monitoring/grafana.py",)),
    "grpc": ("grpcio", GRPC_FILES),
    "grpc_health": ("grpcio-health-checking", GRPC_FILES),
    "grpc_reflection": ("grpcio-reflection", GRPC_FILES),
    "grpc_status": ("grpcio-status", GRPC_FILES),
    "matplotlib": ("matplotlib", ("deploy/monitoring/pictures.py", "kvferry/plan/view.py", "kvferry/bench_serve/picture.py")),
    "msgpack": ("msgpack", ("transfer/messages.py", "transfer/transport/*", "node_runtime/*")),
    "nixl_cu12": ("nixl-cu12", ("transfer/transport/nixl_library.py",)),
    "nixl_cu13": ("nixl-cu13", ("transfer/transport/nixl_library.py",)),
    "numpy": ("numpy", (*DEVICE_FILES, "transfer/storage/client.py")),
    "obstore": ("obstore", ("transfer/storage/object_store.py",)),
    "opentelemetry": ("opentelemetry-sdk", ("node_runtime/tracing_client.py",)),
    "prometheus_client": (
        "prometheus-client",
        ("transfer/metrics/page.py", "kvferry/demo/*", "kvferry/engines/vllm_store_connector.py"),
    ),
    "pydantic": (
        "pydantic",
        (*_files("transfer", "messages config/* load_config"), "node_runtime/*link*.py", "kvferry/engines/*_settings.py"),
    ),
    "rich": ("rich", CLI_FILES),
    "safetensors": ("safetensors", ("embedded_engine/*", "kvferry/*")),
    "structlog": ("structlog", ("transfer/*", *NODES)),
    "textual": ("textual", ("kvferry/top/app.py",)),
    "tokenizers": ("tokenizers", ("embedded_engine/*", "decode_node/text.py", "kvferry/*")),
    "torch": ("torch", DEVICE_FILES),
    "transformers": ("transformers", ("embedded_engine/*", "kvferry/*")),
    "triton": ("triton", ("transfer/copy/*", "embedded_engine/kernels/*")),
    "typer": ("typer", CLI_FILES),
    "ucxx": ("ucxx-cu13", ("transfer/transport/ucx.py", "transfer/transport/ucx_*.py", "kvferry/doctor/host.py")),
    "xxhash": (
        "xxhash",
        ("transfer/storage/envelope.py", "transfer/transport/*", "transfer/copy/*", *NODES),
    ),
    "yaml": ("pyyaml", ("*config.py", "transfer/registry/discovery/sources.py", "kvferry/*", "deploy/monitoring/rule_file.py")),
    "zmq": ("pyzmq", ("transfer/control/zmq_*.py",)),
}

# Engines that load kvferry, each in a separate environment, and the files that may import them. They are not dependencies.
HOSTS: dict[str, tuple[str, ...]] = {
    "sglang": ("kvferry/engines/sglang_*.py",),
    # The plugin is loaded in engines without kvferry, too, so it is outside of `kvferry.engines`, which changes gRPC's log.
    "vllm": ("kvferry/engines/vllm_*.py", "kvferry/vllm_plugin.py"),
}


class Import(NamedTuple):
    """An imported module (dotted, absolute) and the line of its import."""

    module: str
    line: int


def _is_one_of(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def _file_of(module: str) -> str:
    """Return the path of a dotted module of ours, relative to the root; the file need not exist."""
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"


def imports_of(path: str, source: str) -> Iterator[Import]:
    """Yield all modules that the source of `path` imports; `from package import name` counts as an existing submodule."""
    package = list(Path(path).parent.parts)
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            yield from (Import(module=alias.name, line=node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{module}.{alias.name}"
                file = ROOT / _file_of(submodule)
                exists = file.exists() or file.with_suffix(".pyi").exists()  # an extension module has a stub
                yield Import(module=submodule if exists else module, line=node.lineno)


def violations(path: str, source: str) -> Iterator[str]:
    """Yield one line per import of `path` that breaks the rule."""
    own = Path(path).parts[0]
    is_pure = _is_one_of(path, L0) or _is_one_of(path, SANS_IO)
    for found in imports_of(path, source):
        top = found.module.partition(".")[0]
        reason = None
        if top == own or top in PACKAGES:
            reason = _why_not_ours(path, own, found.module, top)
        elif top in sys.stdlib_module_names:
            if _is_one_of(path, LOGIC) and top in IMPURE_STDLIB:
                reason = "logic uses no clock, random numbers, threads, sockets or environment"
        elif is_pure or _is_one_of(path, LOGIC):
            reason = "pure code imports no other library"
        elif _is_one_of(path, L1) and top not in L1_LIBRARIES | {"numpy"}:
            reason = f"layer 1 may import {', '.join(sorted(L1_LIBRARIES))}"
        elif top in HOSTS:
            if not _is_one_of(path, HOSTS[top]):
                reason = f"only these files may import it: {', '.join(HOSTS[top])}"
        elif top not in FOREIGN:
            reason = "not in the table FOREIGN of this test: add the files that may import it, and declare it in pyproject.toml"
        elif not _is_one_of(path, FOREIGN[top][1]):
            reason = f"only these files may import it: {', '.join(FOREIGN[top][1])}"
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


def test_every_file_follows_the_dependency_rule() -> None:
    files = _our_files()
    assert {"transfer/layout.py", "transfer/receive/receiver.py", "kvferry/router/metrics.py"} <= set(files)
    broken = [line for path in files for line in violations(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not broken, "\n" + "\n".join(broken)


def test_no_files_import_each_other_in_a_circle() -> None:
    files = _our_files()
    graph = {
        path: {_file_of(found.module) for found in imports_of(path, (ROOT / path).read_text(encoding="utf-8"))} for path in files
    }
    TopologicalSorter(graph).prepare()  # CycleError lists the files of a circle


def test_no_public_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in _our_files():
        if path.startswith("deploy/"):  # generators, which are not installed
            continue
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("transfer/ring.py", "import bisect\nfrom transfer.errors import ConfigError", None),
        ("transfer/ring.py", "def f():\n    import torch", "pure code imports no other library"),
        ("transfer/ring.py", "import time", "logic uses no clock"),
        ("transfer/transport/base.py", "from .inproc import InprocTransport", "layer 0 may import layer 0"),
        ("transfer/messages.py", "from transfer.transport.ucx import UcxTransport", "layer 1 may import layers 0 and 1"),
        ("transfer/send/sender.py", "from transfer.config import Settings", "a state machine may import"),
        ("prefill_node/node.py", "import decode_node.node", "prefill_node may import only"),
        ("embedded_engine/paged_attention.py", "import triton", "only these files may import it"),
    ],
)
def test_a_planted_violation_is_reported(path: str, source: str, reason: str | None) -> None:
    found = list(violations(path, source))
    assert [reason in line for line in found] == [True] if reason else not found


def test_every_foreign_library_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    declared = {re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower() for requirement in requirements}
    assert {distribution for distribution, _ in FOREIGN.values()} <= declared


def test_wire_contracts_contain_no_python() -> None:
    """`import proto` must import the package of proto-plus."""
    assert not list((ROOT / "proto").rglob("*.py"))
