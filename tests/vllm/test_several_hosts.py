"""vLLM engines that span hosts (here two groups of processes on one), and data-parallel ranks: their leaders, ports and KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from tests.free_port import free_port
from tests.samples import sample
from tests.vllm.answers import Answer, answers
from tests.vllm.commands import vllm_command, vllm_environment
from tests.vllm.instances import READY, connector, page
from tests.vllm.servers import HOST, Server, Servers

Start = Callable[..., Server]

ON_LOOPBACK = {"VLLM_HOST_IP": HOST, "GLOO_SOCKET_IFNAME": "lo"}
"""For the processes of both hosts to find each other."""


def sent_bytes(http_address: str, **labels: str) -> float:
    return sample(page(f"http://{http_address}/metrics"), "kvferry_transferred_bytes_total", **labels)


def addresses(server: Server) -> dict[str, str]:
    """host:port of the gRPC API of each kvferry in a server -> that of its HTTP endpoints."""
    return dict(READY.findall(server.log.read_text(encoding="utf-8", errors="replace")))


async def test_an_engine_on_two_hosts(
    servers: Servers,
    vllm_server: Start,
    route: Start,
    model: Path,
    prompts: Mapping[int, str],
    reference: Mapping[int, Answer],
) -> None:
    """vLLM gives both hosts one engine_id; the second host's rank finds its leader by the address alone."""
    with ExitStack() as stack:
        address, master = (stack.enter_context(free_port()) for _ in range(2))
        config = connector("kv_producer", {"leader": {"address": f"{HOST}:{address}"}})
        hosts = ["--nnodes", "2", "--master-addr", HOST, "--master-port", str(master), "--distributed-executor-backend", "mp"]
        prefill = vllm_server(
            model, tp=2, kv_transfer_config=config, name="first-host", environment=ON_LOOPBACK, args=[*hosts, "--node-rank", "0"]
        )
        python, _, _, *options = vllm_command(
            model, tp=2, kv_transfer_config=config, args=[*hosts, "--node-rank", "1", "--headless"]
        )
        second = servers.start("second-host", [python, "-m", "tests.vllm.headless", *options], vllm_environment() | ON_LOOPBACK)
        try:
            decode = vllm_server(
                model, kv_transfer_config=connector("kv_consumer", {"join_on_request": True}, policy="fail"), in_core=True
            )
            prefill.wait_ready()
            router = route(prefill=[prefill], decode=[decode.wait_ready()]).wait_ready()
            found = await answers(router.url, prompts.values())
            assert dict(zip(prompts, found, strict=True)) == reference
            [http] = addresses(prefill).values()
            assert sent_bytes(http, rank="0") == sent_bytes(http, rank="1") > 0
        finally:
            servers.end([second])


async def test_data_parallel_ranks(
    vllm_server: Start, route: Start, model: Path, prompts: Mapping[int, str], reference: Mapping[int, Answer]
) -> None:
    """Each rank has its leader, on the next port. The router learns the rank of each prompt from its answer."""
    with ExitStack() as stack:
        port = stack.enter_context(free_port())
        config = connector("kv_producer", {"server": {"port": port}})
        prefill = vllm_server(model, kv_transfer_config=config, name="two-replicas", args=["--data-parallel-size", "2"])
        decode = vllm_server(
            model, kv_transfer_config=connector("kv_consumer", {"join_on_request": True}, policy="fail"), in_core=True
        )
        router = route(prefill=[prefill.wait_ready()], decode=[decode.wait_ready()], args=["--flow", "sequential"]).wait_ready()
        found = await answers(router.url, prompts.values())
        assert dict(zip(prompts, found, strict=True)) == reference
        ready = addresses(prefill)
        assert sorted(ready) == [f"{HOST}:{port}", f"{HOST}:{port + 1}"]
        assert all(sent_bytes(http) > 0 for http in ready.values()), "each rank has sent some"
