"""Nodes that cannot start report one line and the right exit code, and leave nothing. Nodes that do not fit do not join."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvferry.local_cluster.cluster import ClusterNode
from node_runtime import exit_codes
from tests.cluster.calls import Caller, prompt, status_of, until
from tests.cluster.conftest import POOL_TOKENS
from tests.cluster.open_nodes import Nodes, open_nodes

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A command line that must be refused.

    Args:
        arguments: Of ``serve``; MODEL, TRUNCATED and PORT stand for a good model, a damaged one, and a port in use.
        says: What the one line must name.
        exit_code: With which the process ends.
    """

    role: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    exit_code: int = exit_codes.BAD_INPUT


REFUSALS = {
    "store that cannot be written": Refusal(
        role="prefill",
        arguments=("--model", "MODEL", "--set", "storage.directory=/proc/kv"),
        says=("storage.directory is /proc/kv", "can write"),
    ),
    "no room": Refusal(
        role="decode",
        arguments=("--model", "MODEL", "--set", "memory.device_memory=60MiB"),
        says=("no page of KV fits", "ring 68.0 MiB", "ring.capacity_bytes"),
        exit_code=exit_codes.DOES_NOT_FIT,
    ),
    "memory that the system refuses": Refusal(
        role="decode",
        arguments=(
            "--model",
            "MODEL",
            "--set",
            "engine=tests.cluster.nodes.hungry_engine:load_too_much",
            "--set",
            "memory.static_fraction=0.5",
        ),
        says=(
            "out of memory while starting rank 0",
            "1152921504606846976 bytes asked for",
            "lower memory.static_fraction (now 0.5)",
        ),
        exit_code=exit_codes.DOES_NOT_FIT,
    ),
    "corrupt weights": Refusal(role="prefill", arguments=("--model", "TRUNCATED"), says=("model.safetensors",)),
    "gRPC port in use": Refusal(role="prefill", arguments=("--model", "MODEL", "--port", "PORT"), says=("PORT", "in use")),
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with open_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def words(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return the values of the words in capitals."""
    folder = tmp_path_factory.mktemp("damaged")
    truncated = folder / "truncated"
    shutil.copytree(model, truncated)
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {
            "MODEL": str(model),
            "TRUNCATED": str(truncated),
            "PORT": str(taken.getsockname()[1]),
        }


@pytest.fixture(scope="module")
def outcomes(nodes: Nodes, words: dict[str, str]) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """All refused commands, two at a time: importing is most of their life."""

    def run(refusal: Refusal) -> subprocess.CompletedProcess[str]:
        arguments = [words.get(argument, argument) for argument in refusal.arguments]
        command = [sys.executable, "-m", f"{refusal.role}_node", "serve", "--port=0", "--http-port=0", "--insecure", *arguments]
        return subprocess.run(command, env=nodes.environment(), capture_output=True, text=True, timeout=120, check=False)

    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(run, refusal) for name, refusal in REFUSALS.items()}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_in_one_line(
    name: str, outcomes: dict[str, Future[subprocess.CompletedProcess[str]]], words: dict[str, str]
) -> None:
    ended = outcomes[name].result()
    refusal = REFUSALS[name]
    assert ended.returncode == refusal.exit_code, ended.stderr
    assert "Traceback" not in ended.stderr
    says = [words.get(word, word) for word in refusal.says]
    lines = [line for line in ended.stderr.splitlines() if all(word in line for word in says)]
    assert len(lines) == 1, f"one line is to name {says}: {ended.stderr}"


def test_refused_nodes_leave_nothing(nodes: Nodes, outcomes: dict[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    for ended in outcomes.values():
        ended.result()
    left = {pid: command for pid, command in nodes.processes().items()}
    assert not left


def other_model(model: Path, folder: Path) -> Path:
    """The same architecture, another vocabulary's worth of end tokens and another rotary base: it must not be mixed up."""
    other = folder / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    config["max_position_embeddings"] = 2048
    config["rms_norm_eps"] = 1e-5 if config.get("rms_norm_eps") != 1e-5 else 1e-6
    (other / "config.json").write_text(json.dumps(config))
    return other


async def test_nodes_that_do_not_fit_do_not_join_and_say_why(tmp_path: Path, model: Path) -> None:
    """Three decode nodes behind one prefill node: another model, a ring below a chunk, and one with a dead address as well."""
    with socket.socket() as closed, open_nodes(tmp_path) as nodes:
        closed.bind(("127.0.0.1", 0))  # bound, and nobody listens
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
        (port,) = nodes.hold_ports(1)
        address = f"127.0.0.1:{port}"
        pool = {"pool.num_tokens": POOL_TOKENS}
        prefill = nodes.launch("prefill", pool | {"model": model, "server.port": port})
        tight = nodes.launch("decode", pool | {"model": model, "ring.capacity_bytes": 65536}, address)
        other = nodes.launch("decode", pool | {"model": other_model(model, tmp_path)}, address, dead)
        await nodes.until_started(prefill, tight, other)
        assert prefill.address == address

        reason = await reason_for(other, address, "do not fit")
        mine, theirs = await model_fingerprint(other), await model_fingerprint(prefill)
        assert mine != theirs
        assert mine in reason and theirs in reason
        assert "rms_norm_eps" in reason
        assert "\n" not in reason
        assert dead in await reason_for(other, dead, "")
        await is_up_but_not_ready(other, reason)

        reason = await reason_for(tight, address, "ring.capacity_bytes")
        assert "ring.capacity_bytes is 65536" in reason
        assert "a chunk of 128 tokens and 1 layers has 393216 bytes" in reason, reason
        await is_up_but_not_ready(tight, reason)
        assert prefill.exit_code is None


async def reason_for(decode: ClusterNode, address: str, word: str) -> str:
    """The reason why the peer is not joined, once it has that word in it."""
    found: list[str] = []

    async def is_told() -> bool:
        status = await status_of(decode)
        for peer in status.peers if status is not None else ():
            if peer.address == address and peer.state == "lost" and word in peer.reason:
                found.append(peer.reason)
        return bool(found)

    await until(is_told, f"a reason with {word!r} for {address}")
    return found[0]


async def model_fingerprint(node: ClusterNode) -> str:
    status = await status_of(node)
    assert status is not None
    return status.instance.model_fingerprint


async def is_up_but_not_ready(decode: ClusterNode, reason: str) -> None:
    assert decode.exit_code is None
    assert (await decode.http("/healthz"))[0] == 200
    code, text = await decode.http("/readyz")
    assert code == 503
    assert reason in text
    async with Caller(decode.address) as caller:
        answer = await caller.ask(prompt(10))
    assert answer.code is grpc.StatusCode.UNAVAILABLE
    assert "no prefill node is joined" in answer.details
