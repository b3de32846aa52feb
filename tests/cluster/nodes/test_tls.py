"""Certificates of a running cluster are replaced under load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from tests.authority import Authority, Files
from tests.cluster.calls import Reference, prompt, until
from tests.cluster.conftest import HEARTBEAT_S, POOL_TOKENS, START_TIMEOUT_S, Start
from transfer.errors import PeerUnreachable, TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.security import MutualTls

pytestmark = pytest.mark.timeout(300)

NAMES = {
    "prefill": ("prefill-0.example", "spiffe://cluster.example/prefill"),
    "decode": ("decode-0.example",),
    "client": ("spiffe://cluster.example/operator",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """A running cluster and the files of everybody in it."""

    cluster: LocalCluster
    authority: Authority
    files: dict[str, Files]
    folder: Path

    def client(self, files: Files | None = None) -> NodeClient:
        return NodeClient(self.cluster.decode.address, security=self.security(files or self.files["client"]))

    def security(self, files: Files) -> MutualTls:
        return files.security(NAMES["prefill"][1], NAMES["decode"][0])


@pytest.fixture(scope="module")
def sides(model: Path, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    folder, authority = tmp_path_factory.mktemp("tls"), Authority()
    files = {side: authority.files(folder / side, *names) for side, names in NAMES.items()}
    settings = {"restart.backoff_s": 0.1, "restart.max_restarts": 10}
    names = {side: known[-1] for side, known in NAMES.items()}
    of_prefill = files["prefill"].settings(peers=names["decode"], clients=names["client"])
    of_decode = files["decode"].settings(peers=names["prefill"], clients=names["client"])
    spec = ClusterSpec(
        prefill=TierSpec(model=model, tp_size=2, pool_tokens=POOL_TOKENS, settings=settings | of_prefill),
        decode=TierSpec(model=model, tp_size=1, page_size=32, pool_tokens=POOL_TOKENS, settings=settings | of_decode),
        security=files["client"].security(names["prefill"], names["decode"]),
        heartbeat_s=HEARTBEAT_S,
        start_timeout_s=START_TIMEOUT_S,
    )
    with start(spec) as cluster:
        yield Sides(cluster=cluster, authority=authority, files=files, folder=folder)


async def generate(client: NodeClient, token_ids: list[int], max_new_tokens: int = 12) -> list[int]:
    question = pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), max_new_tokens=max_new_tokens, ignore_eos=True)
    tokens: list[int] = []
    async for event in client.generate(question, accept_timeout_s=60, timeout_s=120):
        tokens += event.tokens.token_ids
    return tokens


async def test_a_new_authority_under_load_and_what_comes_after(sides: Sides, reference: Reference) -> None:
    """Trust both authorities, renew everything, trust the new one alone: no request fails. Restarted ranks use the new files."""
    new, is_over = Authority(), asyncio.Event()
    own, token_ids = sides.security(sides.files["client"]), prompt(200, 7)
    num_answers = 0

    async def ask() -> None:
        nonlocal num_answers
        while not is_over.is_set():
            # A connection each time, so that all kinds of certificates meet; of one process, which keeps what it had.
            async with NodeClient(sides.cluster.decode.address, security=own) as client:
                assert await generate(client, token_ids, 8) == reference.tokens(token_ids, 8)
            num_answers += 1

    async def settle() -> None:
        enough = num_answers + 3
        await until(lambda: num_answers >= enough or any(one.done() for one in load), "answers go on", within_s=120)
        assert not any(one.done() for one in load), "a request failed while certificates changed"

    reference.tokens(token_ids, 8)
    load = [asyncio.ensure_future(ask()) for _ in range(2)]
    try:
        await settle()
        for files in sides.files.values():
            files.put(ca=sides.authority.pem + new.pem)
            await settle()
        for side, files in sides.files.items():
            cert, key = new.issue(*NAMES[side])
            files.put(key=key)  # half of it: nobody takes it
            await settle()
            files.put(cert=cert)
            await settle()
        for files in sides.files.values():
            files.put(ca=new.pem)
            await settle()
        is_over.set()
        await asyncio.gather(*load)
    finally:
        for one in load:
            one.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    for node in sides.cluster.nodes:
        _, page = await node.http("/metrics")
        assert list(node.log.events("certificate_reloaded")), node.role
        assert f'kvferry_certificate_stale{{role="{node.role}"}} 0.0' in page

    old = sides.authority.files(sides.folder / "old", *NAMES["client"])
    old.put(ca=sides.authority.pem + new.pem)
    async with sides.client(old) as client:
        with pytest.raises(PeerUnreachable, match="does not accept this side's certificate"):
            await client.status(timeout_s=30)

    incarnation = sides.cluster.prefill.incarnation
    os.kill(sides.cluster.prefill.rank_pids[0], signal.SIGKILL)
    await until(lambda: sides.cluster.prefill.lives_anew(incarnation), "the ranks live again", within_s=120)
    await sides.cluster.wait_joined(120)

    async def is_served() -> bool:
        try:
            async with sides.client() as client:
                return await generate(client, token_ids, 8) == reference.tokens(token_ids, 8)
        except TransferError:
            return False  # the decode node may not have noticed yet that the life it had joined is over

    await until(is_served, "a request is served by the new life", within_s=120)
