"""One shared cluster for most tests of faults, with real processes, sockets and the default heartbeat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.local_cluster.cluster import ClusterSpec, LocalCluster, TierSpec
from kvferry.local_cluster.spec import Role
from tests.cluster.calls import Caller, prompt
from tests.cluster.conftest import START_TIMEOUT_S, running
from tests.cluster.faults.faulty_node import FAULTS_FILE
from tests.cluster.faults.scenario import Tiers

RING_BYTES = 1 << 20
POOL_TOKENS = 6144
MAX_QUEUED = 16


class FaultySpec(ClusterSpec):
    """Cluster whose ranks can lose, repeat and delay messages."""

    def command(self, role: Role, index: int, *, port: int, prefill_addresses: Sequence[str], ready_file: Path) -> list[str]:
        places = {"port": port, "prefill_addresses": prefill_addresses, "ready_file": ready_file}
        python, module, _, *rest = super().command(role, index, **places)
        return [python, module, "tests.cluster.faults.faulty_node", role, *rest]


@dataclass(slots=True, kw_only=True)
class Chaos(Tiers):
    """The shared cluster. Its ranks may have been restarted."""

    cluster: LocalCluster
    faults: Path

    def disturb(self, **faults: Mapping[str, float]) -> None:
        """Set the faults of "control" and "watermark" messages, see `faulty_node.Faults`. Without arguments, end all faults."""
        new = self.faults.with_suffix(".new")
        new.write_text(json.dumps(faults))
        new.rename(self.faults)

    def done(self) -> str:
        """Return one letter per faulty message so far: lost (L), repeated (R) or held back (H)."""
        path = Path(f"{self.faults}.done")
        return path.read_text() if path.exists() else ""

    def relaunch(self, role: Role) -> None:
        """Start a killed node again, at the same address."""
        node = self.cluster.launch(role)
        if role == "prefill":
            self.prefill = node
        else:
            self.decode = node


@pytest.fixture(scope="session")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    faults = tmp_path_factory.mktemp("faults") / "faults.json"
    settings = {"restart.backoff_s": 0.1, "restart.max_restarts": 50}
    decode_settings = settings | {"limits.max_queued_requests": MAX_QUEUED}
    tier = TierSpec(model=model, tp_size=2, page_size=16, pool_tokens=POOL_TOKENS, settings=settings)
    spec = FaultySpec(
        prefill=tier,
        decode=TierSpec(model=model, tp_size=2, page_size=32, pool_tokens=POOL_TOKENS, settings=decode_settings),
        ring_bytes=RING_BYTES,
        start_timeout_s=START_TIMEOUT_S,
    )
    with running(LocalCluster(spec, environment={FAULTS_FILE: str(faults)})) as cluster:
        chaos = Chaos(
            prefill=cluster.prefill,
            decode=cluster.decode,
            prefill_ranks=2,
            decode_ranks=2,
            sessions=2,
            cluster=cluster,
            faults=faults,
        )
        asyncio.run(warm_up(chaos))
        yield chaos


def reached_at(model: Path, host: str, port: int) -> dict[str, object]:
    """Return settings of a node of one rank that advertises this address to its peers."""
    return {"model": model, "pool.num_tokens": POOL_TOKENS, "server.advertise_host": host, "server.port": port}


async def warm_up(tiers: Tiers) -> None:
    """Send requests before the first fault, so that files and sockets that stay open are part of the idle state."""
    await tiers.until_idle(within_s=60)
    async with Caller(tiers.decode.address) as caller:
        answers = await asyncio.gather(*(caller.ask(prompt(600, variant), 20) for variant in range(4)))
    assert all(answer.done for answer in answers), answers
    await tiers.until_idle(within_s=30)
    await tiers.remember_idle()


@pytest.fixture
async def tiers(shared: Chaos) -> AsyncIterator[Chaos]:
    """Return the shared cluster, joined and without faults. Start the nodes again that the previous test ended."""
    shared.disturb()
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role, node in zip(roles, shared.nodes, strict=True):
        if node.exit_code is not None:
            shared.relaunch(role)
    await shared.cluster.wait_joined(START_TIMEOUT_S)
    yield shared
    shared.disturb()
