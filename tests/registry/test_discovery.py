"""Addresses that are given, in a file, or behind a DNS name; what is refused, and what is kept while nothing can be seen."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.authority import Authority
from tests.registry.attaches import serving
from tests.registry.secure_node import tls_of
from tests.runtime.instances import until
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.discovery import Discovery, Looks, Source
from transfer.registry.discovery import watcher as found_module
from transfer.registry.discovery.entries import MAX_FOUND, RefusedFor, sort_entries
from transfer.registry.discovery.sources import MAX_FILE_BYTES, DnsNodes, GivenNodes, NodeFile, why_not_serving
from transfer.registry.discovery.watcher import NOT_ANSWERED
from transfer.registry.security import PlainText
from transfer.registry.server import RegistryServer

LOOK_S = 0.02


@asynccontextmanager
async def found(source: Source, ask: Callable[[str], Awaitable[str]] | None = None) -> AsyncIterator[Discovery]:
    discovery = Discovery(source, security=PlainText(), ask=ask)
    discovery.start()
    try:
        yield discovery
    finally:
        await discovery.close()


def anything_goes(address: str) -> None:
    pass


# Entries


@given(st.lists(st.one_of(st.text(), st.integers(), st.none(), st.from_regex(r"[a-z.]{1,9}:[0-9]{1,6}", fullmatch=True))))
def test_every_entry_is_used_once_or_refused(entries: list[object]) -> None:
    found = sort_entries(entries, anything_goes, most=5)
    assert list(found.addresses) == sorted(set(found.addresses)) and len(found.addresses) <= 5
    assert set(found.addresses) <= {entry for entry in entries if isinstance(entry, str)}
    again = sort_entries(list(reversed(entries)), anything_goes, most=5)
    assert again.addresses == found.addresses, "the order of a look means nothing"
    for refused in found.refused:
        assert refused.entry not in found.addresses and refused.entry in refused.reason and refused.reason.isascii()


@pytest.mark.parametrize(
    "entry",
    ["", "host:65536", "::1:7100", 7100, {"address": "a:1"}, "a" * 100_000, "1.2.3.400:80", "host:" + "0" * 5000 + "80",
     "unix:80", "dns:///a:80"],  # URIs for gRPC
)  # fmt: skip
def test_an_invalid_entry_is_refused_and_named(entry: object) -> None:
    (refused,) = sort_entries([entry], anything_goes).refused
    assert refused.kind is RefusedFor.MALFORMED and "it must be host:port" in refused.reason and len(refused.reason) < 300


def test_names_and_addresses_of_every_kind_are_used() -> None:
    entries = ["a:1", "123456789012:1", "kvferry-prefill.kvferry.svc.cluster.local.:7100", "prefill_1:7100", "10.0.0.1:65535"]
    entries += ["[fe80::1%eth0]:1", "[::1]:1"]
    assert sort_entries(entries, anything_goes).addresses == tuple(sorted(entries))


def test_an_entry_that_is_no_text_is_not_logged() -> None:
    bomb: list[object] = ["x"]
    for _ in range(100):
        bomb = [bomb, bomb]  # as YAML's aliases make of a few hundred bytes; its text would have 2**100 elements
    found = sort_entries([bomb, 16**5000, "127.0.0.1:7100"], anything_goes)
    assert found.addresses == ("127.0.0.1:7100",)
    assert [refused.entry for refused in found.refused] == ["list", "int"]


def test_too_many_are_refused_and_so_is_plain_text_to_other_machines() -> None:
    many = [f"127.0.0.1:{port}" for port in range(1, MAX_FOUND + 4)]
    found = sort_entries([*many, "10.0.0.1:7100"], lambda address: PlainText().check("prefill node", address))
    assert len(found.addresses) == MAX_FOUND
    kinds = [refused.kind for refused in found.refused]
    assert kinds.count(RefusedFor.TOO_MANY) == 3 and kinds.count(RefusedFor.PLAIN_TEXT) == 1
    assert any("1027 prefill nodes are named; there can be 1024" in refused.reason for refused in found.refused)


# Whatever the source


class Scripted:
    """A source that says what a test tells it to."""

    where = "the test"

    def __init__(self) -> None:
        self.looks: Looks | None = None

    async def follow(self, looks: Looks) -> None:
        self.looks = looks
        await asyncio.Event().wait()

    async def saw(self, *entries: str) -> None:
        await until(lambda: self.looks)
        assert self.looks is not None
        self.looks.saw(entries)


async def test_given_nodes_are_known_at_once_and_never_grow_old() -> None:
    async with found(GivenNodes(("127.0.0.1:2", "127.0.0.1:1"))) as discovery:
        await until(lambda: discovery.addresses)
        assert discovery.addresses == ("127.0.0.1:1", "127.0.0.1:2")
        await asyncio.sleep(0.02)
        assert discovery.view.age_s == 0 and str(discovery.view) == "peers.prefill_nodes"


async def test_a_failure_keeps_the_last_addresses_and_is_logged_once() -> None:
    source = Scripted()
    told: list[tuple[str, ...]] = []
    with capture_logs() as lines:
        async with found(source) as discovery:
            discovery.listen(told.append)
            assert "nothing was heard from there yet" in str(discovery.view)
            await source.saw("127.0.0.1:1", "127.0.0.1:2")
            assert source.looks is not None
            for _ in range(3):
                source.looks.failed("it is away")
            assert discovery.addresses == ("127.0.0.1:1", "127.0.0.1:2")
            assert discovery.view.failures == 3 and "looking failed: it is away" in str(discovery.view)
            await source.saw("127.0.0.1:2")
            assert discovery.addresses == ("127.0.0.1:2",) and not discovery.view.problem
            discovery.unlisten(told.append)
            await source.saw()
    assert told == [(), ("127.0.0.1:1", "127.0.0.1:2"), ("127.0.0.1:2",)]
    assert [line["event"] for line in lines] == [
        "prefill_nodes_named", "discovery_failed", "discovery_recovered", "prefill_nodes_no_longer_named",
        "prefill_nodes_no_longer_named",
    ]  # fmt: skip


async def test_nodes_that_do_not_serve_wait_and_used_nodes_are_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(found_module, "ASK_AGAIN_S", 0.01)
    answers = {"127.0.0.1:1": "", "127.0.0.1:2": "it is starting"}
    asked: Counter[str] = Counter()

    async def ask(address: str) -> str:
        asked[address] += 1
        return answers[address]

    source = Scripted()
    with capture_logs() as lines:
        async with found(source, ask) as discovery:
            await source.saw("127.0.0.1:1", "127.0.0.1:2")
            await until(lambda: asked["127.0.0.1:2"] > 2)  # again and again, without another look
            assert discovery.addresses == ("127.0.0.1:1",)
            assert "127.0.0.1:2 is not used yet: it is starting" in str(discovery.view)
            answers["127.0.0.1:1"], answers["127.0.0.1:2"] = "it has gone bad", ""
            await until(lambda: discovery.addresses == ("127.0.0.1:1", "127.0.0.1:2"))
            assert not discovery.view.waiting
            await source.saw("127.0.0.1:1", "127.0.0.1:2")
            await asyncio.sleep(0.05)
            assert discovery.addresses == ("127.0.0.1:1", "127.0.0.1:2")
            assert asked["127.0.0.1:1"] == 1, "whether a used one lives, its join says"
            await source.saw("127.0.0.1:2")
            assert discovery.addresses == ("127.0.0.1:2",)
            await source.saw("127.0.0.1:1", "127.0.0.1:2")
            await until(lambda: asked["127.0.0.1:1"] > 1)
            assert discovery.addresses == ("127.0.0.1:2",), "it was away, so it is asked as a new one"
    assert [line["event"] for line in lines].count("discovered_node_not_used_yet") == 2, "once for each time that it has come"


async def test_a_node_that_does_not_answer_does_not_delay_others() -> None:
    """Neither those of the same look, nor the next look, nor itself, once it has gone and another one has its address."""
    answers = {f"127.0.0.1:{port}": asyncio.get_running_loop().create_future() for port in (1, 2, 3)}
    asked: list[str] = []

    async def ask(address: str) -> str:
        asked.append(address)
        return await asyncio.shield(answers[address])

    source = Scripted()
    told: list[tuple[str, ...]] = []
    async with found(source, ask) as discovery:
        discovery.listen(told.append)
        await source.saw("127.0.0.1:1", "127.0.0.1:2")
        assert discovery.view.waiting == dict.fromkeys(("127.0.0.1:1", "127.0.0.1:2"), NOT_ANSWERED)
        answers["127.0.0.1:2"].set_result("")
        await until(lambda: discovery.addresses == ("127.0.0.1:2",))
        answers["127.0.0.1:3"].set_result("")
        await source.saw("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
        await until(lambda: discovery.addresses == ("127.0.0.1:2", "127.0.0.1:3"))
        assert asked == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"], "who has not answered is not asked once more"
        await source.saw("127.0.0.1:3")
        assert not discovery.view.waiting
        await source.saw("127.0.0.1:1", "127.0.0.1:3")
        await until(lambda: asked.count("127.0.0.1:1") == 2)
        answers["127.0.0.1:1"].set_result("")
        await until(lambda: len(discovery.addresses) == 2)
        await source.saw()
    assert told == [
        (), ("127.0.0.1:2",), ("127.0.0.1:2", "127.0.0.1:3"), ("127.0.0.1:3",), ("127.0.0.1:1", "127.0.0.1:3"), (),
    ]  # fmt: skip


async def test_a_bug_of_a_source_is_said_and_the_source_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.registry.discovery.watcher.AGAIN_S", 0.01)

    class Broken(Scripted):
        num_follows = 0

        async def follow(self, looks: Looks) -> None:
            self.num_follows += 1
            if self.num_follows < 3:
                raise ZeroDivisionError("nobody expected this")
            looks.saw(["127.0.0.1:1"])

    with capture_logs() as lines:
        async with found(Broken()) as discovery:
            await until(lambda: discovery.addresses)
            assert discovery.view.failures == 2
    assert [line["event"] for line in lines].count("discovery_broke") == 2


# A file


async def test_a_file_is_looked_at_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    with capture_logs() as lines:
        async with found(NodeFile(path, interval_s=LOOK_S)) as discovery:
            await until(lambda: discovery.view.problem)
            assert f"file {path} (discovery.file)" in str(discovery.view) and "No such file" in str(discovery.view)
            path.write_text("- 127.0.0.1:1\n- 127.0.0.1:2\n")
            await until(lambda: len(discovery.addresses) == 2)
            replace(path, "['127.0.0.1:3', 'no port', 4]")
            await until(lambda: discovery.addresses == ("127.0.0.1:3",))
            assert discovery.view.refused["malformed"] == 2
            for broken in ("127.0.0.1:4", "- [", "a: b", "", "\x00", "[" * 100_000, "- x\n" * MAX_FILE_BYTES):
                replace(path, broken)
                failures = discovery.view.failures
                await until(lambda failures=failures: discovery.view.failures > failures + 1)
                assert discovery.addresses == ("127.0.0.1:3",), broken[:20]
            path.unlink()
            await until(lambda: "No such file" in discovery.view.problem)
            assert discovery.addresses == ("127.0.0.1:3",)
            replace(path, "[]")
            await until(lambda: discovery.addresses == () and not discovery.view.problem)
            age_s = discovery.view.age_s
            assert age_s is not None and age_s < 5
    assert [line["event"] for line in lines].count("discovery_failed") == 2, "once for each time that it is broken"


def replace(path: Path, content: str) -> None:
    """As a ConfigMap is: anyone who reads sees the old file or the new one."""
    new = path.with_suffix(".new")
    new.write_text(content)
    os.replace(new, path)


# DNS


async def test_every_address_of_a_name_is_a_node_and_a_failing_resolver_takes_none_away() -> None:
    records: frozenset[str] | OSError = frozenset({"127.0.0.2", "::1", "127.0.0.1"})

    async def resolve(host: str) -> frozenset[str]:
        assert host == "kvferry-prefill"
        if isinstance(records, OSError):
            raise records
        return records

    async with found(DnsNodes("kvferry-prefill:7100", interval_s=LOOK_S, resolve=resolve)) as discovery:
        await until(lambda: discovery.addresses)
        assert discovery.addresses == ("127.0.0.1:7100", "127.0.0.2:7100", "[::1]:7100")
        records = OSError(-2, "Name or service not known")
        await until(lambda: discovery.view.problem)
        assert len(discovery.addresses) == 3 and "kvferry-prefill: Name or service not known" in str(discovery.view)
        records = frozenset({"127.0.0.2"})
        await until(lambda: discovery.addresses == ("127.0.0.2:7100",))
        assert not discovery.view.problem


async def test_the_system_is_asked() -> None:
    async with found(DnsNodes("localhost:7100", interval_s=5)) as discovery:
        await until(lambda: discovery.addresses)
        assert "127.0.0.1:7100" in discovery.addresses
    for name in ("no-such-name.invalid", "a..b", "x" * 300):
        async with found(DnsNodes(f"{name}:7100", interval_s=5)) as discovery:
            await until(lambda discovery=discovery: discovery.view.problem)
            assert discovery.addresses == () and name in discovery.view.problem


# Health


class Control(pb_grpc.PrefillControlServicer):
    pass


def node(**how: object) -> AbstractAsyncContextManager[RegistryServer]:
    return serving(prefill_control=Control(), **how)  # type: ignore[abstract]


async def test_a_node_is_used_when_its_health_service_reports_serving() -> None:
    security = PlainText()
    async with node() as server:
        assert "it does not serve" in await why_not_serving(security, server.address)
        await server.set_serving(True)
        assert await why_not_serving(security, server.address) == ""
    assert server.address in await why_not_serving(security, server.address), "nobody listens there any more"
    async with serving() as other:
        await other.set_serving(True)
        assert "it is no prefill node" in await why_not_serving(security, other.address)


async def test_with_tls_a_node_proves_its_identity_before_its_answer_counts(tmp_path: Path) -> None:
    ours = Authority()
    security = tls_of(ours.files(tmp_path / "decode", "decode.example"), peers=("prefill.example",))
    for authority, name, said in (
        (ours, "prefill.example", ""),
        (ours, "other.example", "other.example"),
        (Authority(), "prefill.example", "certificate"),
    ):
        files = authority.files(tmp_path / f"node-{name}-{said}", name)
        async with node(security=tls_of(files, peers=("decode.example",))) as server:
            await server.set_serving(True)
            why_not = await why_not_serving(security, server.address)
        assert said in why_not and bool(said) is bool(why_not)
