"""Tokens that are queued for a caller: they are joined while they wait, and delayed if there are many streams."""

from __future__ import annotations

import asyncio
import itertools

from decode_node.progress import MAX_JOINED_TOKENS, MESSAGES_PER_S, Pace, ProgressQueue
from tests.runtime.virtual_time import in_virtual_time
from transfer.pb import kvferry_pb2 as pb


def test_tokens_that_wait_are_joined_up_to_a_bound() -> None:
    queue = ProgressQueue()
    for number in range(MAX_JOINED_TOKENS + 2):
        queue.put_nowait(pb.GeneratedTokens(token_ids=(number,), text=str(number)))
    queue.put_nowait(pb.GenerateDone(finish_reason="length"))
    first, rest, done = (queue.get_nowait() for _ in range(3))
    assert isinstance(first, pb.GeneratedTokens) and isinstance(rest, pb.GeneratedTokens) and isinstance(done, pb.GenerateDone)
    numbers = [*first.token_ids, *rest.token_ids]
    assert numbers == list(range(MAX_JOINED_TOKENS + 2)) and first.text + rest.text == "".join(map(str, numbers))
    assert len(first.token_ids) == MAX_JOINED_TOKENS and queue.empty()


async def messages(step_s: float, *, num_streams: int, num_steps: int) -> list[tuple[float, int]]:
    """Time and number of tokens of each message of a stream, if each step takes `step_s`."""
    loop, queue, pace, sent = asyncio.get_running_loop(), ProgressQueue(), Pace(), list[tuple[float, int]]()

    async def steps() -> None:
        for number in range(num_steps):
            queue.put_nowait(pb.GeneratedTokens(token_ids=(number,)))
            await asyncio.sleep(step_s)

    computing = asyncio.create_task(steps())
    begun_s = loop.time()
    while sum(tokens for _, tokens in sent) < num_steps:
        await pace.wait(num_streams)
        event = await queue.get()
        assert isinstance(event, pb.GeneratedTokens)
        sent.append((loop.time() - begun_s, len(event.token_ids)))
        pace.sent(len(event.token_ids))
    await computing
    return sent


@in_virtual_time
async def test_each_step_is_a_message_while_the_leader_keeps_up() -> None:
    sent = await messages(0.011, num_streams=MESSAGES_PER_S // 100, num_steps=20)
    assert [tokens for _, tokens in sent] == [1] * 20


@in_virtual_time
async def test_above_a_load_messages_are_spaced_and_the_first_token_is_not_held_back() -> None:
    sent = await messages(0.003, num_streams=MESSAGES_PER_S // 10, num_steps=400)
    assert sent[0] == (0.0, 1)
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(sent[1:])]
    assert min(gaps) > 0.099 and max(tokens for _, tokens in sent) < 40
