"""`import transfer` costs nothing that its user may not have: no torch, no network library, no compiler."""

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
    """What is in sys.modules of a fresh interpreter after `statement`."""
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
        # The leaders compute nothing: two seconds of every node's start went into torch, which only its ranks need.
        ("import prefill_node.node, decode_node.node", COMPUTE),
        # A node's fork server imports torch before anything else happens, and until its settings are known, nothing is loaded
        # that they do not need.
        ("import decode_node.__main__", BEYOND_SETTINGS | {"pydantic", "typer"}),
        ("import decode_node.command", BEYOND_SETTINGS),
        ("import prefill_node.command", BEYOND_SETTINGS),
    ],
)
def test_import_loads_no_unwanted_module(statement: str, unwanted: set[str]) -> None:
    assert not _modules_loaded_by(statement) & unwanted
