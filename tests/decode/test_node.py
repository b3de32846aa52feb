"""A decode leader's own affairs: what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from decode_node.node import DecodeNode
from decode_node.rank_messages import CODEC, PART_BYTES, RunStep, StepPart, check_step_fits
from node_runtime.daemon import Daemon, NodeState
from node_runtime.transfer_ids import MAX_REQUEST_ID_CHARS, new_transfer_id
from tests.runtime.instances import decode_config
from transfer.control.base import MAX_PAYLOAD_BYTES
from transfer.errors import ConfigError

DAEMON = cast(Daemon, SimpleNamespace(state=NodeState.READY))
MOST_RUNNING = MAX_PAYLOAD_BYTES // PART_BYTES - 1


def test_a_step_larger_than_a_message_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = decode_config(tmp_path, limits={"max_running_requests": MOST_RUNNING + 1})
    refusal = f"limits.max_running_requests is {MOST_RUNNING + 1}; .* takes 1048576: it can be at most {MOST_RUNNING}"
    with pytest.raises(ConfigError, match=refusal):
        DecodeNode(DAEMON, config)


def test_the_largest_step_that_is_allowed_fits_its_message(tmp_path: Path) -> None:
    assert MOST_RUNNING > 2000
    check_step_fits(decode_config(tmp_path, limits={"max_running_requests": MOST_RUNNING}))
    longest = new_transfer_id("\U0001f600" * MAX_REQUEST_ID_CHARS)
    part = StepPart(request_id=longest, token_id=2**32 - 1, position=2**32 - 1)
    assert len(CODEC.encode(RunStep(step=2**62, parts=(part,) * MOST_RUNNING))) <= MAX_PAYLOAD_BYTES
