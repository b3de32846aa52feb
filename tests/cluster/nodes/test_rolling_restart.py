"""Two nodes in each tier: all are restarted under load, an operator drains one and undoes it, and a second signal ends one."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]
from transformers import AutoTokenizer

from kvferry.cli.node_client import NodeClient
from kvferry.demo.model import TRAINING_TEXT
from kvferry.local_cluster.cluster import ClusterNode, ClusterSpec, LocalCluster, TierSpec
from kvferry.local_cluster.spec import ROLES, Role
from kvferry.router.serve import open_router
from kvferry.router.settings import RouterSettings
from node_runtime import exit_codes
from tests.cluster.calls import Caller, Reference, decode_control, prompt, until, until_idle
from tests.cluster.conftest import HEARTBEAT_S, POOL_TOKENS, START_TIMEOUT_S, Start
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import PlainText

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import DecodeControlAsyncStub

pytestmark = pytest.mark.timeout(300)

NUM_REQUESTS = 200
RATE_PER_S = 6.0
MOST_IN_FLIGHT = 8  # a machine that has better things to do gets no pile of requests that outlasts a drain
NEW_TOKENS = 8
PROMPTS = [prompt(length, variant) for variant, length in enumerate((10, 40, 150, 300))]
WORDS = TRAINING_TEXT.split()
TEXTS = [" ".join(WORDS[first : first + number]) for first, number in ((0, 10), (100, 100))]
LONG_TEXT = " ".join((WORDS * 4)[:1500])  # two seconds of a core: it comes where a node is ended, not all the time
LONG_TEXT_TOKENS = 2000
COMMAND_S = 60.0
UPGRADES = Path(__file__).resolve().parents[3] / "docs" / "upgrades.md"


@pytest.fixture(scope="module")
def cluster(model: Path, start: Start) -> Iterator[LocalCluster]:
    tier = TierSpec(model=model, pool_tokens=POOL_TOKENS)
    spec = ClusterSpec(
        prefill=tier, decode=tier, num_prefill=2, num_decode=2, heartbeat_s=HEARTBEAT_S, start_timeout_s=START_TIMEOUT_S
    )
    with start(spec) as cluster:
        yield cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, as token ids or as text, with the right answer."""

    prompt: list[int] | str
    num_tokens: int
    new_ids: tuple[int, ...]
    expected: str


@dataclass(slots=True, kw_only=True)
class Load:
    """Requests that come at random, and while few are in flight whatever becomes of those before them. Every fourth one is text,
    and every fourth one goes past the router.

    Args:
        url: A router's.
        direct: A plain gRPC client's stub.
        ids, texts: What is asked, in turn.
        wrong: What was no right answer.
    """

    url: str
    direct: DecodeControlAsyncStub
    ids: list[Question]
    texts: list[Question]
    wrong: list[str] = field(default_factory=list)
    num_sent: int = 0
    num_right: int = 0
    _session: aiohttp.ClientSession | None = None
    _group: asyncio.TaskGroup | None = None

    async def run(self, is_enough: asyncio.Event) -> None:
        """Until there have been `NUM_REQUESTS`, and `is_enough`, and all are answered."""
        gaps = random.Random(8)
        async with aiohttp.ClientSession() as self._session, asyncio.TaskGroup() as self._group:
            while self.num_sent < NUM_REQUESTS or not is_enough.is_set():
                turn, which = divmod(self.num_sent, 4)
                if self.num_sent - self.num_right - len(self.wrong) < MOST_IN_FLIGHT:
                    question = self.ids[(turn + which) % len(self.ids)] if which else self.texts[turn % len(self.texts)]
                    self.send(question, is_direct=which == 3)
                await asyncio.sleep(gaps.expovariate(RATE_PER_S))

    def send(self, question: Question, *, is_direct: bool = False) -> None:
        """One more, now."""
        assert self._group is not None
        self._group.create_task(self._ask_node(question) if is_direct else self._ask(question))
        self.num_sent += 1

    async def _ask_node(self, question: Question) -> None:
        ids = pb.TokenIds(ids=[] if isinstance(question.prompt, str) else question.prompt)
        tokens: list[int] = []
        try:
            asked = pb.GenerateRequest(token_ids=ids, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            async for event in self.direct.Generate(asked, timeout=60):
                tokens.extend(event.tokens.token_ids)
        except grpc.aio.AioRpcError as error:
            self.wrong.append(f"direct, {question.num_tokens} tokens: {error.code()}: {error.details()}")
            return
        if tuple(tokens) != question.new_ids:
            self.wrong.append(f"direct, {question.num_tokens} tokens: {tokens} instead of {question.new_ids}")
        else:
            self.num_right += 1

    async def _ask(self, question: Question) -> None:
        assert self._session is not None
        body = {"prompt": question.prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        what = f"{'text' if isinstance(question.prompt, str) else 'ids'} of {question.num_tokens} tokens"
        try:
            async with self._session.post(f"{self.url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(60)) as answer:
                said = await answer.text()
                if answer.status != 200:
                    self.wrong.append(f"{what}: {answer.status}: {said}")
                    return
                found = json.loads(said)
                told = (found["choices"][0]["text"], found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"])
                if told != (question.expected, question.num_tokens, NEW_TOKENS):
                    self.wrong.append(f"{what}: {told} instead of {question.expected!r}")
                else:
                    self.num_right += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.wrong.append(f"{what}: {type(error).__name__}: {error}")


def questions(model: Path, reference: Reference, prompts: Iterable[list[int] | str]) -> list[Question]:
    """With the answers of one process, whose tokenizer is transformers' and no node's."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)  # type: ignore[no-untyped-call]

    def question(prompt: list[int] | str) -> Question:
        ids = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        new_ids = tuple(reference.tokens(ids, NEW_TOKENS))
        expected = tokenizer.decode(new_ids, skip_special_tokens=True)
        return Question(prompt=prompt, num_tokens=len(ids), new_ids=new_ids, expected=expected)

    assert tokenizer(TEXTS[0]).input_ids[0] == tokenizer.bos_token_id, "texts begin with a token of no text"
    return [question(prompt) for prompt in prompts]


def service_config() -> str:
    """Return the service config that docs/upgrades.md recommends for channels."""
    (block,) = re.findall(r"```json\n(.*?loadBalancingConfig.*?)```", UPGRADES.read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


async def test_every_node_is_restarted_under_load_and_no_request_fails(
    cluster: LocalCluster, model: Path, reference: Reference
) -> None:
    ids, texts = questions(model, reference, map(list, PROMPTS)), questions(model, reference, TEXTS)
    (long_text,) = questions(model, reference, [LONG_TEXT])
    assert long_text.num_tokens >= LONG_TEXT_TOKENS
    addresses = tuple(node.address for node in cluster.decode_nodes)
    urls = tuple(f"grpc://{address}" for address in addresses)
    settings = RouterSettings(prefill=(), decode=urls, port=0, health_interval_s=0.2)
    options = [("grpc.service_config", service_config()), ("grpc.max_reconnect_backoff_ms", 2000)]
    async with (
        open_router(settings, PlainText()) as router,
        grpc.aio.insecure_channel(f"ipv4:{','.join(addresses)}", options=options) as channel,
    ):
        await until(lambda: router.backend.readiness().is_ready, "the router is ready")
        load = Load(url=f"http://{router.address}", direct=decode_control(channel), ids=ids, texts=texts)
        all_restarted = asyncio.Event()
        loading = asyncio.create_task(load.run(all_restarted))
        try:
            await until(lambda: load.num_right > 0, "it is under load")
            lives = {node.name: node.incarnation for node in cluster.nodes}
            # Both tiers at once, neither of which waits for the other: nothing but `/readyz` says when the next one may go.
            await asyncio.gather(*(roll_out(cluster, role, load, long_text) for role in ROLES))
            all_restarted.set()
            await loading
            await cluster.wait_joined()
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
    assert load.wrong == [] and load.num_right == load.num_sent >= NUM_REQUESTS
    assert all(node.incarnation != lives[node.name] for node in cluster.nodes)
    await until_idle(*cluster.nodes)


async def roll_out(cluster: LocalCluster, role: Role, load: Load, long_text: Question) -> None:
    """One node of a tier after the other, each as soon as the one before is ready."""
    for index in range(2):
        if role == "decode":
            load.send(long_text)
            await asyncio.sleep(0.01)  # the router has it, a node perhaps not yet
        await restart(cluster, role, index)


async def restart(cluster: LocalCluster, role: Role, index: int) -> None:
    """Restart a node as a service manager does: send SIGTERM, start it again, and wait for its `/readyz`."""
    node = (cluster.prefill_nodes if role == "prefill" else cluster.decode_nodes)[index]
    node.terminate()
    await until(lambda: node.exit_code is not None, f"{node.name} ended", within_s=60)
    assert node.exit_code == 0, node.log.tail()
    again = cluster.launch(role, index)

    async def is_ready() -> bool:
        return (await again.readiness()).is_ready

    await until(is_ready, f"{again.name} is ready", within_s=START_TIMEOUT_S)


async def command(*words: str, target: ClusterNode) -> tuple[int, str, str]:
    """`kvferry node ...`; exit code, standard output, standard error."""
    arguments = ["-m", "kvferry", "node", *words, "--target", target.address, "--insecure"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), COMMAND_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_an_operator_drains_a_decode_node_and_thinks_better_of_it(cluster: LocalCluster, reference: Reference) -> None:
    node = cluster.decode_nodes[1]
    async with Caller(node.address) as caller, NodeClient(node.address) as client:
        code, shown, _ = await command("requests", "--json", target=node)
        assert code == 0 and json.loads(shown) == {"requests": [], "total": 0}
        reference.tokens(PROMPTS[1], 800)  # computed before, so that nobody waits for it
        answer, task = caller.begin(PROMPTS[1], 800, request_id="long")
        await until(lambda: len(answer.tokens) > 3, "some tokens")
        (one,) = (await client.list_requests()).requests
        assert (one.request_id, one.stage, one.prompt_tokens, one.max_new_tokens) == ("long", "generating", 40, 800)
        assert one.generated_tokens > 3 and one.ranks_done == 1 and one.transfer_id.startswith("long.")
        assert one.peer in {other.address for other in cluster.prefill_nodes}
        assert await client.drain(budget_s=0.3) == 1
        status = await client.status()
        assert (status.state, status.draining, status.ready) == ("draining", True, False)
        refused = caller.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), max_new_tokens=1))
        with pytest.raises(grpc.aio.AioRpcError) as draining:
            await refused.read()
        said = rpc_status.from_call(draining.value)
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert said.details[0].Unpack(info) and (info.reason, info.domain) == ("NODE_DRAINING", "kvferry")
        assert said.details[1].Unpack(retry) and retry.retry_delay.ToTimedelta().total_seconds() == 0
        code, shown, _ = await command("undrain", target=node)
        assert code == 0 and "takes requests again" in shown
        reference.check(PROMPTS[0], await caller.ask(PROMPTS[0]))
        reference.check(PROMPTS[1], await task)
        assert await client.drain(budget_s=5) == 0
        assert await client.undrain() and not await client.undrain()
    await until_idle(*cluster.nodes)


async def test_a_second_signal_cuts_off_what_is_in_flight(cluster: LocalCluster) -> None:
    """Last: it ends a node."""
    node = cluster.decode_nodes[1]
    async with Caller(node.address) as caller, NodeClient(node.address) as client:
        answer, task = caller.begin(PROMPTS[1], 3000)
        await until(lambda: len(answer.tokens) > 3, "some tokens")
        node.terminate()

        async def is_draining() -> bool:
            return (await client.status()).draining

        await until(is_draining, "it drains")
        assert not task.done()
        node.terminate()
        assert ((await task).code, answer.details) == (grpc.StatusCode.UNAVAILABLE, "the node has shut down")
    await until(lambda: node.exit_code is not None, "it ended")
    assert node.exit_code == exit_codes.ABORTED and node.ready_file is None
