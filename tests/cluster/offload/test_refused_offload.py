"""A decode node refuses settings of offload at the start: one line, with the setting and its numbers, and an exit code.

tests/offload/test_sizes.py, test_rules.py and tests/storage/test_directory.py check every refusal without a process.
"""

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
        settings: By path.
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
    "an engine that cannot read host pages": Refusal(
        settings=("engine=tests.cluster.offload.blind_engine:load_engine", "offload.host_ratio=2", "offload.device_window=64"),
        says=("offload.device_window is 64", "tests.cluster.offload.blind_engine:load_engine cannot read KV in host memory"),
    ),
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with open_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def outcomes(nodes: Nodes, model: Path) -> Iterator[dict[str, Future[Ended]]]:
    """All refused commands, two at a time: importing is most of their life."""

    def run(refusal: Refusal) -> Ended:
        command = [sys.executable, "-m", "decode_node", "serve", "--insecure", "--model", str(model)]
        for setting in ("pool.num_tokens=1024", "pool.page_size=8", *refusal.settings):
            command += ["--set", setting]
        return subprocess.run(command, env=nodes.environment(), capture_output=True, text=True, timeout=120, check=False)

    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(run, refusal) for name, refusal in REFUSALS.items()}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_in_one_line(name: str, outcomes: dict[str, Future[Ended]]) -> None:
    ended, refusal = outcomes[name].result(), REFUSALS[name]
    assert ended.returncode == refusal.exit_code, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if all(part in line for part in refusal.says)]
    assert len(lines) == 1, f"one line is to name {refusal.says}: {ended.stderr}"


def test_refused_nodes_leave_nothing(nodes: Nodes, outcomes: dict[str, Future[Ended]]) -> None:
    for ended in outcomes.values():
        ended.result()
    assert not nodes.processes()
