"""Light modules import no torch, network library or compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = "from transfer import KVLayout, Shard, routes, split_into_chunks, StagingAllocator, RingView, Grant, Watermark"
HEAVY = {"torch", "triton", "numpy", "transformers", "zmq", "grpc", "google.protobuf", "ucxx", "aiohttp", "rich"}
COMPUTE = {"torch", "triton", "numpy", "transformers", "ucxx"}
BEYOND_SETTINGS = HEAVY | {"msgpack", "structlog", "prometheus_client", "node_runtime.daemon", "node_runtime.rank_process"}
THIRD_PARTY_OF_LAYER_1 = {"msgpack", "pydantic", "prometheus_client", "structlog", "xxhash", "yaml"}


def _modules_loaded_by(statement: str) -> set[str]:
    """Return the names in sys.modules of a new interpreter after `statement`."""
    code = f"import sys; {statement}; import json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        (PUBLIC, HEAVY | THIRD_PARTY_OF_LAYER_1),
        ("import transfer.transport.base", HEAVY | THIRD_PARTY_OF_LAYER_1),
        ("import transfer.messages", HEAVY),
        # Only ranks need torch. In the leaders, its import took two seconds of each start of a node.
        ("import prefill_node.node, decode_node.node", COMPUTE),
        # The fork server imports torch first. Until the settings are known, the leader loads only the modules that the settings
        # need.
        ("import decode_node.__main__", BEYOND_SETTINGS | {"pydantic", "typer"}),
        ("import decode_node.command", BEYOND_SETTINGS),
        ("import prefill_node.command", BEYOND_SETTINGS),
    ],
)
def test_import_loads_no_unwanted_module(statement: str, unwanted: set[str]) -> None:
    loaded = sorted(_modules_loaded_by(statement) & unwanted)
    assert not loaded, f"{statement!r} loads {', '.join(loaded)}"
