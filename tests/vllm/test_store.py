"""vLLM servers with kvferry's store: prefixes survive a restart and are shared. If the store fails, vLLM recomputes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.samples import sample
from tests.vllm.answers import Answer, answers
from tests.vllm.instances import assert_nothing_is_left, connector, kvferry_metrics, page
from tests.vllm.servers import Server
from transfer.errors import ConfigError

BLOCK_TOKENS = 128
WAIT_S = 60.0


def store_connector(directory: Path, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`--kv-transfer-config` of an instance with a store in that directory."""
    common = {"storage.directory": str(directory), "offload.host_memory": "128MiB"}
    return {
        "kv_connector": "KvferryStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": common | dict(settings or {}),
    }


def num_blocks(prompts: Mapping[int, str]) -> int:
    """Number of whole blocks of prompts. vLLM loads all of them. If they cover a whole prompt, it recomputes the last token."""
    return sum(length // BLOCK_TOKENS for length in prompts)


def pages_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*-vllm") if path.is_file())


def pages(server: Server, op: str, outcome: str) -> float:
    """Number of pages in calls of the store. The server updates it with each step."""
    return sample(page(f"{server.url}/metrics"), "kvferry_store_operations_total", op=op, outcome=outcome)


def until_pages(server: Server, op: str, outcome: str, wanted: int) -> None:
    until(lambda: pages(server, op, outcome) == wanted, f"{server.name} reports {op} of {wanted} pages: {outcome}")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.1)


def assert_answers(server: Server, prompts: Mapping[int, str], reference: Mapping[int, Answer]) -> None:
    found = asyncio.run(answers(server.url, prompts.values()))
    assert dict(zip(prompts, found, strict=True)) == {length: reference[length] for length in prompts}


def vllm_config(directory: Path, **changes: Any) -> Any:
    """The parts of vLLM's configuration that the connector checks first."""
    parts = {
        "kv_role": "kv_both", "prefix_caching_hash_algo": "sha256", "distributed_executor_backend": "mp", "nnodes_within_dp": 1,
        "world_size": 2, "kv_connector_extra_config": store_connector(directory)["kv_connector_extra_config"],
    }  # fmt: skip
    part = SimpleNamespace(**parts | changes)
    return SimpleNamespace(kv_transfer_config=part, cache_config=part, parallel_config=part)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_role": "kv_producer"}, "kv_role is kv_producer; it must be kv_both, because KvferryStoreConnector loads and saves"),
        (
            {"prefix_caching_hash_algo": "xxhash"},
            "hash-algo is xxhash; stored pages need one of sha256, sha256_cbor",
        ),
        ({"nnodes_within_dp": 2}, "the workers are on 2 hosts; it must be mp on one host"),
        ({"distributed_executor_backend": "ray"}, "--distributed-executor-backend is ray .*; it must be mp on one host"),
        ({"kv_connector_extra_config": {}}, "storage.directory and storage.url are null; set one of them"),
    ],
)
def test_an_unsupported_setting_is_rejected_by_name(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvferry.engines.vllm_store_connector import KvferryStoreConnector

    with pytest.raises(ConfigError, match=said):
        KvferryStoreConnector(vllm_config(tmp_path, **changes), KVConnectorRole.SCHEDULER, None)


@pytest.fixture(scope="module")
def directory(
    vllm_server: Callable[..., Server],
    model: Path,
    prompts: Mapping[int, str],
    reference: Mapping[int, Answer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A store with the blocks of all prompts. The server that saved them has ended."""
    folder = tmp_path_factory.mktemp("store") / "pages"
    server = vllm_server(model, kv_transfer_config=store_connector(folder), name="saves", in_core=True).wait_ready()
    assert_answers(server, prompts, reference)
    until(lambda: len(pages_of(folder)) == num_blocks(prompts), "all whole blocks are in the store")
    assert not server.stop()
    return folder


@pytest.fixture(scope="module")
def pair(directory: Path, vllm_server: Callable[..., Server], model: Path) -> tuple[Server, Server]:
    """Two servers that share the store of `directory`: TP 1, like the server that saved the pages, and TP 2."""
    one = vllm_server(model, kv_transfer_config=store_connector(directory), name="loads-tp1", in_core=True)
    two = vllm_server(model, tp=2, kv_transfer_config=store_connector(directory), name="loads-tp2")
    return one.wait_ready(), two.wait_ready()


def test_stored_prefixes_are_loaded_by_two_servers_at_once(
    pair: tuple[Server, Server], prompts: Mapping[int, str], reference: Mapping[int, Answer]
) -> None:
    asked = {length: prompts[length] for length in list(prompts)[:-5]}
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda server: assert_answers(server, asked, reference), pair))
    for server in pair:
        until_pages(server, "get", "ok", num_blocks(asked))
        assert pages(server, "get", "corrupt") == pages(server, "put", "failed") == 0
        loaded = sample(page(f"{server.url}/metrics"), "vllm:external_prefix_cache_hits_total")
        assert loaded == num_blocks(asked) * BLOCK_TOKENS


def test_damaged_pages_are_recomputed_and_saved_again(
    pair: tuple[Server, Server], directory: Path, prompts: Mapping[int, str], reference: Mapping[int, Answer]
) -> None:
    asked = {length: prompts[length] for length in list(prompts)[-5:]}
    # Pages that were read have a newer modification time.
    unread = sorted(pages_of(directory), key=lambda file: file.stat().st_mtime)[: num_blocks(asked)]
    num_bytes = unread[0].stat().st_size
    damaged = {}
    for number, file in enumerate(unread):
        content = file.read_bytes()
        damaged[file] = content[:-1] + bytes([content[-1] ^ 1]) if number % 2 else content[:-100]
        file.write_bytes(damaged[file])

    def is_saved_again(file: Path) -> bool:
        return file.exists() and file.stat().st_size == num_bytes and file.read_bytes() != damaged[file]

    first, second = pair
    assert_answers(first, asked, reference)
    until_pages(first, "get", "corrupt", num_blocks(asked))
    until(lambda: all(map(is_saved_again, unread)), "the pages are saved again")
    assert_answers(second, asked, reference)
    until_pages(second, "get", "ok", num_blocks(prompts))
    assert pages(second, "get", "corrupt") == 0


def test_without_its_store_a_server_recomputes(
    pair: tuple[Server, Server], directory: Path, prompts: Mapping[int, str], reference_server: Server
) -> None:
    """New prompts are answered without the store. When it is back, new pages are saved."""
    away = directory.with_name("away")
    directory.rename(away)
    others = [f"{number} {prompts[300]}" for number in range(6)]
    expected = asyncio.run(answers(reference_server.url, others))
    server = pair[0]
    assert asyncio.run(answers(server.url, others)) == expected
    until(lambda: pages(server, "put", "failed") > 0, "the server reports pages that it could not save")
    away.rename(directory)
    before = len(pages_of(directory))
    extra = itertools.count(len(others))

    def is_saved() -> bool:
        asyncio.run(answers(server.url, [f"{next(extra)} {prompts[300]}"]))
        return len(pages_of(directory)) > before

    until(is_saved, "pages are saved again")


def test_the_store_connector_works_with_the_transfer_connector(
    directory: Path,
    vllm_server: Callable[..., Server],
    route: Callable[..., Server],
    model: Path,
    prompts: Mapping[int, str],
    reference: Mapping[int, Answer],
) -> None:
    """The prefill server loads stored prefixes, and transfers whole prompts to a decode server, which also saves pages."""

    def multi(role: str, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        connectors = [connector(role, settings), store_connector(folder)]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": connectors},
        }

    other = directory.with_name("of-decode")
    prefill = vllm_server(model, kv_transfer_config=multi("kv_producer", {}, directory), name="store-prefill", in_core=True)
    decode = vllm_server(
        model, kv_transfer_config=multi("kv_consumer", {"join_on_request": True}, other), name="store-decode", in_core=True
    )
    router = route(prefill=[prefill.wait_ready()], decode=[decode.wait_ready()]).wait_ready()
    assert_answers(router, prompts, reference)
    until_pages(prefill, "get", "ok", num_blocks(prompts))
    until(lambda: len(pages_of(other)) == num_blocks(prompts), "the decode server has saved all whole blocks")
    assert sample(kvferry_metrics(decode), "kvferry_transferred_bytes_total") > 0
    assert_nothing_is_left(prefill, decode)
