"""The process that ranks are forked from: what it imports, and that it is gone when a node is refused."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from embedded_engine.architectures import ARCHITECTURES
from node_runtime.fork_server import end_fork_server, start_fork_server
from node_runtime.preloading import preloaded_modules
from tests.runtime.instances import decode_config, prefill_config

ROOT = Path(__file__).resolve().parents[2]
TRANSFORMERS = Path(importlib.util.find_spec("transformers").origin).parent  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_familys_module_has_its_class(architecture: str) -> None:
    module = ARCHITECTURES[architecture].module.removeprefix("transformers.").replace(".", "/")
    assert f"class {architecture}(" in (TRANSFORMERS / f"{module}.py").read_text()


def test_the_model_and_the_role_say_what_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForCausalLM"]}))
    modules = preloaded_modules(decode_config(tmp_path))
    assert modules == (
        "embedded_engine.without_accelerate",
        "embedded_engine.models_package",
        "embedded_engine.loading",
        "transformers.models.gemma3.modeling_gemma3",
        "decode_node.rank",
        "decode_node.worker",
    )
    cut = preloaded_modules(decode_config(tmp_path, parallel={"tp_size": 2}))
    assert cut == modules[1:]
    own = preloaded_modules(prefill_config(tmp_path, engine="somebodys.engine:load"))
    assert own == ("prefill_node.rank", "prefill_node.worker")


@pytest.mark.parametrize("content", [None, "{", '{"architectures": ["NobodysModel"]}'])
def test_a_model_that_is_refused_later_names_no_family(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert not [name for name in preloaded_modules(decode_config(tmp_path)) if name.startswith("transformers")]


def _collector(connection: Any) -> None:
    import gc

    connection.send((gc.isenabled(), gc.get_freeze_count(), "decimal" in sys.modules))


@pytest.fixture
def no_fork_server() -> Iterator[None]:
    end_fork_server()
    yield
    end_fork_server()


@pytest.mark.usefixtures("no_fork_server")
def test_a_rank_collects_garbage_but_not_what_its_fork_server_imported() -> None:
    start_fork_server(["decimal", "module_of_nobody"])
    context = get_context("forkserver")
    ours, theirs = context.Pipe()
    rank = context.Process(target=_collector, args=(theirs,))
    rank.start()
    is_enabled, num_frozen, is_imported = ours.recv()
    rank.join()
    assert is_enabled and num_frozen > 1000 and is_imported


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_is_refused_leaves_no_process(role: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"{role}_node", "serve", "--insecure", "--model", str(tmp_path)]
    refused = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = refused.communicate(timeout=60)  # ends when the last process of the node has closed its standard error
        assert refused.returncode == 2 and "it has no config.json" in errors and len(errors.splitlines()) == 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(refused.pid, signal.SIGKILL)
