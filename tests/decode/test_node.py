"""A decode leader's own affairs: what it refuses before anything starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from decode_node import node as node_module
from decode_node.node import DecodeNode
from decode_node.rank_messages import CODEC, PART_BYTES, RunStep, StepPart, check_step_fits
from node_runtime.daemon import Daemon, NodeState
from node_runtime.transfer_ids import MAX_REQUEST_ID_CHARS, new_transfer_id
from tests.runtime.instances import decode_config
from transfer.control.base import MAX_PAYLOAD_BYTES
from transfer.errors import ConfigError, StagingError

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


async def test_the_prompts_that_wait_to_be_tokenised_are_bounded_also_when_their_callers_go_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each can have 16 MB, and is not in the queue yet whose length is bounded."""
    gate = asyncio.Event()

    async def encode(text: str, *, max_tokens: int) -> tuple[int, ...]:
        await gate.wait()
        return tuple(map(ord, text[:max_tokens]))

    monkeypatch.setattr(node_module, "TextCodec", lambda directory: SimpleNamespace(encode=encode))
    node = DecodeNode(DAEMON, decode_config(tmp_path, limits={"max_queued_requests": 2}))
    stays, leaves = (asyncio.ensure_future(node._tokenise(text, max_tokens=9)) for text in ("ab", "c"))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    with pytest.raises(StagingError, match=r"2 prompts wait to be tokenised, .*limits\.max_queued_requests"):
        await node._tokenise("d", max_tokens=9)
    gate.set()
    assert await stays == (97, 98)
    await asyncio.sleep(0)
    assert await node._tokenise("d", max_tokens=9) == (100,)
