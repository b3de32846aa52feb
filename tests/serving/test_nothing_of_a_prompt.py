"""No prompt and no generated text appears in logs or other data for operators.

The cluster logs at level debug. The test searches all log lines, metrics with their labels, statuses, the status page, traces,
and the command lines and environments of the processes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from kvferry.local_cluster.cluster import LocalCluster
from tests.cluster.calls import Caller, prefill_control, prompt, status_of, until
from tests.serving.conftest import Serving
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.peer_channel import PeerChannel

pytestmark = pytest.mark.timeout(180)

TEXT = "The patient Zebediah Quillfeather-Okonkwo of 17 Marmalade Row has the number 5551234987."
TEXT_TRACES = ("Zebediah", "Quillfeather", "Marmalade", "5551234987")
IDS = tuple((613 * position * position + 389 * position + 271) % 690 + 5 for position in range(120))
WRONG_ID = 987_654_321  # larger than any vocabulary


RUN = 4  # shorter runs of numbers occur by chance


def found_in(text: str, ids: Sequence[int]) -> list[str]:
    """Return words of the prompt and runs of consecutive ids that are in `text`, with any separators between the ids."""
    numbers = re.findall(r"\d+", text)
    runs = {tuple(numbers[begin : begin + RUN]) for begin in range(len(numbers) - RUN + 1)}
    wanted = {tuple(map(str, ids[begin : begin + RUN])) for begin in range(len(ids) - RUN + 1)}
    return [trace for trace in TEXT_TRACES if trace in text] + [str(run) for run in runs & wanted if len(set(run)) >= 3]


def test_the_search_finds_words_and_runs_of_ids_of_the_prompt() -> None:
    for shown in (
        f"ids {list(IDS)}",
        f'{{"ids": {IDS}}}',
        "\n".join(map(str, IDS)),
        f"tensor([{IDS[7]}, {IDS[8]}, {IDS[9]}, {IDS[10]}])",
    ):
        assert found_in(shown, IDS)
    assert found_in(f"prompt {TEXT[:30]}", ()) and found_in("about 5551234987.", ())
    assert not found_in(f"a log line of {IDS[3]} {IDS[4]} {IDS[5]} and {IDS[7]}", IDS)


async def generate(
    caller: Caller, request: pb.GenerateRequest, timeout_s: float = 60.0
) -> tuple[grpc.StatusCode, list[int], str]:
    """Return the status code, the generated ids and the generated text."""
    ids: list[int] = []
    text = ""
    try:
        async for event in caller.stub.Generate(request, timeout=timeout_s):
            ids += event.tokens.token_ids
            text += event.tokens.text
    except grpc.aio.AioRpcError as error:
        return error.code(), ids, text
    return grpc.StatusCode.OK, ids, text


def processes_of(cluster: LocalCluster) -> str:
    shown = []
    for pid, command in cluster.processes().items():
        shown.append(command)
        for name in ("cmdline", "environ", "comm"):
            try:
                shown.append(Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue  # the process has ended
    return "\n".join(shown)


async def test_nothing_of_a_prompt_is_found_anywhere(serving: Serving) -> None:
    codes: list[grpc.StatusCode] = []
    generated: list[tuple[list[int], str]] = []
    invalid, cancelled = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.CANCELLED
    async with serving.caller() as caller:
        # Requests that succeed, as text and as ids.
        for request in (
            pb.GenerateRequest(prompt=TEXT, max_new_tokens=24, ignore_eos=True),
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS), max_new_tokens=24, ignore_eos=True),
        ):
            code, ids, text = await generate(caller, request)
            codes.append(code)
            generated.append((ids, text))
        assert codes == [grpc.StatusCode.OK] * 2 and all(len(ids) == 24 for ids, _ in generated)
        # Requests that are rejected: too long, invalid ids, too many tokens, an invalid stop token, invalid sampling.
        for request in (
            pb.GenerateRequest(prompt=TEXT * 300, max_new_tokens=4),
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS * 300), max_new_tokens=4),
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=(*IDS, WRONG_ID)), max_new_tokens=4),
            pb.GenerateRequest(prompt=TEXT, max_new_tokens=100_000),
            pb.GenerateRequest(prompt=TEXT, max_new_tokens=4, stop_token_ids=[WRONG_ID]),
            pb.GenerateRequest(prompt=TEXT, max_new_tokens=4, sampling=pb.SamplingParams(temperature=-1)),
        ):
            code, _, _ = await generate(caller, request)
            assert code is invalid, request
        # Requests that end early: by an operator, by a deadline, by a client that disconnects.
        long_ids = IDS + prompt(3000)
        flight = asyncio.ensure_future(
            generate(caller, pb.GenerateRequest(request_id="given-up", token_ids=pb.TokenIds(ids=long_ids), max_new_tokens=9))
        )

        async def is_aborted() -> bool:
            return (await caller.stub.Abort(pb.AbortRequest(request_id="given-up", reason="a test"))).found

        await until(is_aborted, "the abort of the request")
        assert (await flight)[0] is grpc.StatusCode.ABORTED
        code, _, _ = await generate(
            caller, pb.GenerateRequest(token_ids=pb.TokenIds(ids=long_ids), max_new_tokens=900, ignore_eos=True), timeout_s=0.3
        )
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        call = caller.stub.Generate(pb.GenerateRequest(prompt=TEXT, max_new_tokens=500, ignore_eos=True))
        await call.read()
        call.cancel()
        assert await call.code() is cancelled
    # Requests to the prefill node from an unknown decode node.
    prefill = PeerChannel(serving.cluster.prefill.address, serving.security("decode"))
    for ids in (IDS, (*IDS, WRONG_ID)):
        stranger = pb.PrefillRequest(request_id="stranger.1", token_ids=ids, decode_incarnation=5)
        with pytest.raises(grpc.aio.AioRpcError, match=r"has not joined|ids must be below the vocabulary"):
            await prefill_control(await prefill.ready()).Prefill(stranger).read()
    await prefill.close()
    await serving.until_idle()

    searched = {"processes": processes_of(serving.cluster)}
    for node in serving.cluster.nodes:
        with open(node.log.path, encoding="utf-8", errors="replace") as log:
            searched[f"log of {node.role}"] = log.read()
        searched[f"metrics of {node.role}"] = (await node.http("/metrics"))[1]
        searched[f"page of {node.role}"] = (await node.http("/status.json"))[1]
        searched[f"status of {node.role}"] = str(await status_of(node))
    searched["traces"] = str(serving.collector.all())
    assert '"level": "debug"' in searched["log of decode"], "the node does not log at level debug"
    assert "given-up" in searched["log of decode"], "the log does not contain the requests of this test"
    for where, text in searched.items():
        for ids in (IDS, *(ids for ids, _ in generated)):
            assert not found_in(text, ids), f"{where} contains a prompt"
        assert str(WRONG_ID) not in text, f"{where} contains a prompt"
        for _, words in generated:
            assert len(words) < 12 or words[:12] not in text, f"{where} contains generated text"
