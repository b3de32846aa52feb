"""A rank is forked with its modules loaded. A module that is missing only makes starts slow, and no other test notices it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from embedded_engine.architectures import ARCHITECTURES
from embedded_engine.model_config import modules_of
from node_runtime.node_role import preloaded_modules
from node_runtime.streaming_copies import TUNABLES, tunables
from tests.runtime.instances import decode_config, prefill_config

ROOT = Path(__file__).resolve().parents[2]
DECODE, PREFILL = ({"node_runtime.rank_process", f"{role}_node.worker"} for role in ("decode", "prefill"))
MODULES = {"torch", "embedded_engine.loading", "transformers.models.llama.modeling_llama", *DECODE}
SET_BEFORE = {"UCX_LOG_LEVEL": "info"}
ENVIRONMENT = {
    **SET_BEFORE,
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "GRPC_VERBOSITY": "NONE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    TUNABLES: tunables({}),
}


def model_of(folder: Path, architecture: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return folder


def test_a_process_forked_from_the_fork_server_has_all_that_a_rank_needs(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT} | SET_BEFORE
    command = [sys.executable, "-m", "tests.runtime.early_leader", str(model_of(tmp_path, "LlamaForCausalLM"))]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    forked = json.loads(done.stdout)
    modules = forked["modules"]
    assert not MODULES - modules.keys()
    order = list(modules)
    assert order.index("torch") < order.index("embedded_engine.without_accelerate"), "torch does not wait for the settings"
    assert modules["transformers.models"] == "module"  # without its table of names
    assert modules["accelerate"] == "NoneType"  # which counts as not installed
    assert {name: forked["environment"].get(name) for name in ENVIRONMENT} == ENVIRONMENT
    assert forked["blocked"] == ["SIGTERM"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_module_of_an_architecture_has_its_class(name: str, tmp_path: Path) -> None:
    """The path of the file is enough: importing transformers for its name would take seconds."""
    *lean, engine, module = modules_of(model_of(tmp_path, name), 1)
    assert [*lean[1:], engine, module] == list(modules_of(tmp_path, 2)), "ranks that share a model need accelerate"
    assert all(importlib.util.find_spec(own) is not None for own in (*lean, engine))
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    text = Path(found.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    assert f"\nclass {name}(" in text


def test_modules_of_a_role(tmp_path: Path) -> None:
    for config_of, modules in ((prefill_config, PREFILL), (decode_config, DECODE)):
        assert modules <= set(preloaded_modules(config_of(model_of(tmp_path, "LlamaForCausalLM"))))
        # The modules of another engine could start threads, or open the GPU. Its ranks import them.
        assert modules == set(preloaded_modules(config_of(tmp_path, engine="json:loads")))
        assert all(importlib.util.find_spec(name) is not None for name in modules)
