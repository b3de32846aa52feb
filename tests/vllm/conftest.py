"""Real vLLM servers: `make test-vllm` (README.md). They are collected only where there is a vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 600.0  # of a test with the servers that start for it

# .venv has no vLLM: it would bring a transformers and a hundred other packages of its own choice.
collect_ignore = [] if importlib.util.find_spec("vllm") else [file.name for file in FOLDER.glob("test_*.py")]

if TYPE_CHECKING:
    from tests.vllm.answers import Answer
    from tests.vllm.servers import Server, Servers

    StartVllm = Callable[..., Server]
    StartRouter = Callable[..., Server]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The end of each running server's log, with a test that fails."""
    report = yield
    servers: Servers | None = item.session.stash.get(SERVERS, None)
    if report.failed and servers is not None:
        report.sections += [(f"log of {server.name}", server.tail()) for server in servers.running]
    return report


SERVERS: pytest.StashKey[Any] = pytest.StashKey()


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    from tests.vllm.servers import Servers

    found = Servers(tmp_path_factory.mktemp("logs"))
    request.session.stash[SERVERS] = found
    yield found
    found.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.vllm.chat_model import make_chat_model

    return make_chat_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="session")
def prompts(model: Path) -> dict[int, str]:
    """The twenty prompts by their number of tokens."""
    from tests.vllm.prompts import make_prompts

    return make_prompts(model)


@pytest.fixture(scope="module")
def vllm_server(servers: Servers) -> Iterator[StartVllm]:
    """Starts a vLLM server, and does not wait for it; it is killed at the end of the module.

    Arguments as of `commands.vllm_command`, and `name` for its log, `in_core` as of `commands.vllm_environment`, `environment`
    on top of that.
    """
    from tests.vllm.commands import vllm_command, vllm_environment

    started: list[Server] = []

    def start(
        model: Path,
        tp: int = 1,
        kv_transfer_config: Mapping[str, Any] | None = None,
        *,
        name: str = "vllm",
        in_core: bool = False,
        environment: Mapping[str, str] | None = None,
        port: int = 0,
        args: Sequence[str] = (),
    ) -> Server:
        command = vllm_command(model, tp=tp, kv_transfer_config=kv_transfer_config, port=port, args=args)
        started.append(servers.start(name, command, vllm_environment(in_core=in_core) | dict(environment or {})))
        return started[-1]

    yield start
    servers.end(started)


@pytest.fixture(scope="module")
def route(servers: Servers) -> Iterator[StartRouter]:
    """Starts `kvferry route` in front of servers that are ready, and does not wait for it; killed at the end of the module."""
    from tests.vllm.commands import route_command

    started: list[Server] = []

    def start(prefill: Sequence[Server], decode: Sequence[Server], *, name: str = "route", args: Sequence[str] = ()) -> Server:
        urls = {"prefill": [server.url for server in prefill], "decode": [server.url for server in decode]}
        started.append(servers.start(name, route_command(**urls, args=args), {}))
        return started[-1]

    yield start
    servers.end(started)


@pytest.fixture(scope="session")
def started_reference(servers: Servers, model: Path) -> Server:
    """Start `reference_server` without waiting for it, so that other servers start meanwhile."""
    from tests.vllm.commands import vllm_command, vllm_environment

    return servers.start("reference", vllm_command(model), vllm_environment(in_core=True))


@pytest.fixture(scope="session")
def reference_server(started_reference: Server) -> Server:
    """One plain vLLM, without a connector; it stays for the whole run and must be left idle."""
    return started_reference.wait_ready()


@pytest.fixture(scope="session")
def reference(reference_server: Server, prompts: Mapping[int, str]) -> dict[int, Answer]:
    """What the plain vLLM answers to the prompts, asked all at once."""
    from tests.vllm.answers import answers

    found = asyncio.run(answers(reference_server.url, prompts.values()))
    return dict(zip(prompts, found, strict=True))
