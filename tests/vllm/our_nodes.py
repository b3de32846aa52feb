"""kvferry's own nodes beside vLLM servers: embedded engines on the same model, run by the Python that runs the tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.node import ClusterNode
from kvferry.local_cluster.spec import Role, child_environment
from tests.cluster.open_nodes import Nodes
from tests.vllm.answers import TIMEOUT_S, Answer
from tests.vllm.instances import HEARTBEAT_S
from transfer.pb import kvferry_pb2 as pb

PAGE_SIZE = 16
POOL_TOKENS = 8192


def launch(nodes: Nodes, role: Role, model: Path, *prefill_nodes: str, **settings: object) -> ClusterNode:
    """Start a node of TP 1 in float32, and do not wait for it.

    Args:
        prefill_nodes: host:port of those that a decode node joins.
        settings: By path, "__" for ".".
    """
    given: dict[str, object] = {
        "model": model,
        "pool.page_size": PAGE_SIZE,
        "pool.num_tokens": POOL_TOKENS,
        "heartbeat.interval_s": HEARTBEAT_S,
    }
    given |= {path.replace("__", "."): value for path, value in settings.items()}
    environment = {"PYTHONPATH": child_environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    return nodes.launch(role, given, *prefill_nodes, environment=environment)


async def generated(address: str, prompt: str, *, max_tokens: int) -> tuple[Answer, pb.GenerateDone]:
    """What a decode node makes of a text, greedily.

    Raises:
        TransferError: The call failed.
    """
    request = pb.GenerateRequest(prompt=prompt, max_new_tokens=max_tokens)
    token_ids: list[int] = []
    text = ""
    async with NodeClient(address) as client:
        async for event in client.generate(request, timeout_s=TIMEOUT_S):
            token_ids.extend(event.tokens.token_ids)
            text += event.tokens.text
            done = event.done
    found = Answer(text=text, token_ids=tuple(token_ids), finish_reason=done.finish_reason, num_prompt_tokens=done.prompt_tokens)
    return found, done


async def all_generated(address: str, prompts: list[str], *, max_tokens: int) -> list[tuple[Answer, pb.GenerateDone]]:
    return list(await asyncio.gather(*(generated(address, prompt, max_tokens=max_tokens) for prompt in prompts)))
