"""The fork server: it has the modules that ranks need, and it ends when the node does not start.

A missing module only makes starts slow, and no other test notices it. The fork server inherits the node's standard output, so
`communicate` returns only after its end.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedded_engine.architectures import ARCHITECTURES
from embedded_engine.model_config import modules_of
from kvferry.local_cluster.fork_server import modules_for
from kvferry.local_cluster.spec import ClusterSpec, TierSpec
from node_runtime import exit_codes
from node_runtime.node_role import preloaded_modules
from node_runtime.process_setup import TUNABLES, tunables
from tests.runtime.instances import decode_config, prefill_config

NODE = [sys.executable, "-m", "decode_node", "serve", "--port=0", "--http-port=0"]
ROOT = Path(__file__).resolve().parents[2]


def open_node(*options: str, **environment: str) -> subprocess.Popen[str]:
    env = os.environ | environment
    return subprocess.Popen([*NODE, *options], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_an_invalid_command_line_leaves_no_process() -> None:
    output, _ = open_node("--nonsense").communicate(timeout=60)
    assert "No such option: --nonsense" in output


def test_a_temporary_folder_whose_path_is_too_long_for_a_socket_is_reported(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    node = open_node("--model", str(tmp_path), "--insecure", TMPDIR=str(deep))
    output, _ = node.communicate(timeout=60)
    assert node.returncode == exit_codes.BAD_INPUT
    assert "AF_UNIX path too long; set TMPDIR to a shorter path" in output and "Traceback" not in output


@pytest.fixture
def short_path() -> Iterator[Path]:
    """For sockets: pytest's own folders can have paths that are too long."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_node_that_is_killed_before_its_settings_are_known_leaves_no_process(
    number: signal.Signals, tmp_path: Path, short_path: Path
) -> None:
    settings = tmp_path / "settings.fifo"
    subprocess.run(["mkfifo", settings], check=True)
    node = open_node("--config", str(settings), TMPDIR=str(short_path))  # waits for a writer
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children")
    deadline_s = time.monotonic() + 30
    while len(pids := children.read_text().split()) < 2:  # the resource tracker and the fork server
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    node.send_signal(number)
    node.wait(60)
    has_waited = not Path(f"/proc/{pids[1]}").exists()
    output, _ = node.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert (node.returncode, output, has_waited, list(short_path.iterdir())) == (exit_codes.OK, "", True, [])


KILLED_BETWEEN_RANKS = """
import multiprocessing, os, signal
from node_runtime.fork_server import end_fork_server, fork_server_pid, start_fork_server
start_fork_server(("json",))
for number in range(2):
    process = multiprocessing.get_context("forkserver").Process(target=print, args=(number,))
    process.start()
    process.join()
    os.kill(fork_server_pid(), signal.SIGKILL)
    os.waitid(os.P_PID, fork_server_pid(), os.WEXITED | os.WNOWAIT)
end_fork_server()
"""


def test_a_fork_server_that_ends_between_two_ranks_is_started_again() -> None:
    command = [sys.executable, "-c", KILLED_BETWEEN_RANKS]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n1\n")


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


def test_modules_of_a_shared_fork_server(tmp_path: Path) -> None:
    model = TierSpec(model=model_of(tmp_path, "LlamaForCausalLM"))
    lean = "embedded_engine.without_accelerate"
    modules = modules_for(ClusterSpec(prefill=model, decode=model))
    assert modules is not None and modules.index(lean) == 0 and {*PREFILL, *DECODE} <= set(modules)
    assert len(modules) == len(set(modules))
    sharded = dataclasses.replace(model, tp_size=2)
    assert lean not in (modules_for(ClusterSpec(prefill=model, decode=sharded)) or (lean,)), "its ranks need accelerate"
    invalid = dataclasses.replace(model, page_size=0)
    assert modules_for(ClusterSpec(prefill=model, decode=invalid)) is None, "the node reports the error"


def test_modules_of_a_role(tmp_path: Path) -> None:
    for config_of, modules in ((prefill_config, PREFILL), (decode_config, DECODE)):
        assert modules <= set(preloaded_modules(config_of(model_of(tmp_path, "LlamaForCausalLM"))))
        # The modules of another engine could start threads, or open the GPU. Its ranks import them.
        assert modules == set(preloaded_modules(config_of(tmp_path, engine="json:loads")))
        assert all(importlib.util.find_spec(name) is not None for name in modules)
