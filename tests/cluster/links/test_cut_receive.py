"""Sessions over a network that is cut in the middle of a receive. UCX can neither complete nor cancel such a receive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.faults.hosts import DATA, open_hosts, why_not

WHY_NOT = why_not()
ROOT = Path(__file__).resolve().parents[3]


pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can")


def run_between_two_hosts(case: str) -> str:
    """Return the last line that a case of `cut_link` prints in the namespace of the decode side."""
    with open_hosts() as hosts:
        command = [
            *hosts.prefix("decode"),
            sys.executable,
            "-m",
            "tests.cluster.links.cut_link",
            case,
            hosts.name("prefill"),
            DATA,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_sessions_can_be_closed_just_after_a_cut() -> None:
    """UCXX would wait for ever for the rest of a message that began to arrive, and with it the loop of a decode rank."""
    assert float(run_between_two_hosts("close")) < 5


def test_a_session_that_a_cut_stopped_in_mid_receive_leaves_at_most_one_descriptor() -> None:
    """UCXX keeps such a receive, and it would keep the session's worker, which has six. The one is UCXX's own for the worker."""
    found = json.loads(run_between_two_hosts("receive"))
    assert found["whole"] == 0, "the cut came too late"
    assert found["left"] <= 1, found
