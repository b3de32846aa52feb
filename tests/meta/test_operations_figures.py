"""What docs/operations.md says about joining and about lanes is what the code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from decode_node.peers import MAX_BACKOFF_S
from node_runtime.supervisor import RANK_SILENCE_S
from transfer.transport.ucx import UcxTransport

TEXT = " ".join((Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text(encoding="utf-8").split())


def test_a_peer_that_does_not_fit_is_asked_again_as_often_as_it_says() -> None:
    assert re.findall(r"asked again every ([\d.]+) s", TEXT) == [f"{MAX_BACKOFF_S:g}"]


def test_a_rank_may_be_silent_for_as_long_as_it_says() -> None:
    assert re.findall(r"has not heard of for ([\d.]+) s is taken to hang", TEXT) == [f"{RANK_SILENCE_S:g}"]


def test_every_obstacle_to_shared_memory_is_named() -> None:
    code = inspect.getsource(UcxTransport._choose_lane)
    (paragraph,) = re.findall(r"\*\*A link is slow\.\*\*.*?(?=\*\*)", TEXT)
    for obstacle in ("UCX_TLS", "cma", "pid namespace", "process_vm_readv", "seccomp", "user"):
        assert obstacle in code and obstacle in paragraph, obstacle
