"""Settings of offload and storage that cannot work are refused at the start: one line, with the setting and its numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.open_nodes import Nodes, open_nodes

pytestmark = pytest.mark.timeout(240)

BAD_CONFIG, NO_MEMORY = 2, 3
Ended = subprocess.CompletedProcess[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A decode node that must not start.

    Args:
        settings: By path; STORE stands for a folder that is empty, FILE for a file, LOCKED for a folder that nobody may write.
        says: What the one line must name.
        exit_code: With which the process ends.
    """

    settings: tuple[str, ...]
    says: tuple[str, ...]
    exit_code: int = BAD_CONFIG


REFUSALS = {
    "less host memory than a stride": Refusal(
        settings=("offload.host_ratio=0.1", "offload.stride_tokens=256"),
        says=("offload.host_ratio is 0.1", "gives 12 host pages", "offload.stride_tokens (256) takes 32 pages of 8 tokens"),
    ),
    "more host memory than there is": Refusal(
        settings=("offload.host_memory=64TiB",), says=("offload.host_memory is 70", "are available"), exit_code=NO_MEMORY
    ),
    "a window that the pool does not hold": Refusal(
        settings=("offload.host_ratio=4", "offload.device_window=960", "offload.stride_tokens=64"),
        says=("offload.device_window is 960 tokens", "take 145 pages of 8 tokens", "the device pool has 128", "pool.num_pages"),
    ),
    "a window without host memory": Refusal(settings=("offload.device_window=64",), says=("device_window is 64", "host_ratio")),
    "host memory said twice": Refusal(
        settings=("offload.host_ratio=2", "offload.host_memory=1GiB"), says=("host_ratio is 2", "host_memory is 1073741824")
    ),
    "an engine that cannot read host pages": Refusal(
        settings=("engine=tests.cluster.offload.blind_engine:load_engine", "offload.host_ratio=2", "offload.device_window=64"),
        says=("offload.device_window is 64", "tests.cluster.offload.blind_engine:load_engine cannot read KV in host memory"),
    ),
    "a store without host memory": Refusal(
        settings=("storage.directory=STORE",), says=("storage.directory is STORE", "offload.host_ratio", "offload.host_memory")
    ),
    "a store that holds no page": Refusal(
        settings=("offload.host_ratio=2", "storage.directory=STORE", "storage.max_bytes=100"),
        says=("storage.max_bytes is 100", "must hold a page"),
    ),
    "a store in a file": Refusal(
        settings=("offload.host_ratio=2", "storage.directory=FILE"), says=("storage.directory is FILE", "must be a folder")
    ),
    "a store that cannot be written": Refusal(
        settings=("offload.host_ratio=2", "storage.directory=LOCKED"), says=("storage.directory is LOCKED", "can write")
    ),
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with open_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the words in capitals stand for."""
    folder = tmp_path_factory.mktemp("store")
    file = folder / "file"
    file.touch()
    return {"STORE": str(folder), "FILE": str(file), "LOCKED": "/proc/1"}  # where even root makes no file


@pytest.fixture(scope="module")
def outcomes(nodes: Nodes, words: dict[str, str], model: Path) -> Iterator[dict[str, Future[Ended]]]:
    """All refused commands, two at a time: importing is most of their life."""

    def run(refusal: Refusal) -> Ended:
        command = [sys.executable, "-m", "decode_node", "serve", "--insecure", "--model", str(model)]
        for setting in ("pool.num_tokens=1024", "pool.page_size=8", *refusal.settings):
            name, _, value = setting.partition("=")
            command += ["--set", f"{name}={words.get(value, value)}"]
        return subprocess.run(command, env=nodes.environment(), capture_output=True, text=True, timeout=120, check=False)

    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(run, refusal) for name, refusal in REFUSALS.items()}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_in_one_line(name: str, outcomes: dict[str, Future[Ended]], words: dict[str, str]) -> None:
    ended, refusal = outcomes[name].result(), REFUSALS[name]
    assert ended.returncode == refusal.exit_code, ended.stderr
    assert "Traceback" not in ended.stderr
    says = [_with(words, part) for part in refusal.says]
    lines = [line for line in ended.stderr.splitlines() if all(part in line for part in says)]
    assert len(lines) == 1, f"one line is to name {says}: {ended.stderr}"


def _with(words: dict[str, str], text: str) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def test_refused_nodes_leave_nothing(nodes: Nodes, outcomes: dict[str, Future[Ended]], words: dict[str, str]) -> None:
    for ended in outcomes.values():
        ended.result()
    assert not nodes.processes()
    assert [path.name for path in Path(words["STORE"]).iterdir()] == ["file"]
