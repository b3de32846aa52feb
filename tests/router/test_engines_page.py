"""docs/engines.md on `kvferry route`: its options exist, its metrics are the code's, its curl lines work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from kvferry.__main__ import app
from kvferry.router.metrics import ROUTER_METRICS
from kvferry.router.node_body import CHAT_TOKENS, COMPLETION_TOKENS
from tests.router.conftest import routing

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## The router: `kvferry route`")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"```\n(.*?)```", SECTION, flags=re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


def curl(line: str) -> tuple[str, str | None]:
    """Path and body of a curl line to the address of the page."""
    words = shlex.split(line)
    (url,) = [word for word in words if word.startswith("http://127.0.0.1:8000")]
    return url.removeprefix("http://127.0.0.1:8000"), words[words.index("-d") + 1] if "-d" in words else None


def test_every_option_that_is_named_exists() -> None:
    route = get_command(app).commands["route"]  # type: ignore[attr-defined]
    known = {option for parameter in route.params for option in parameter.opts}
    shown = " ".join([*(line for line in COMMANDS if line.startswith("kvferry route")), *re.findall(r"`(--[a-z-]+)", SECTION)])
    named = set(re.findall(r"--[a-z-]+", shown))
    assert len(named) > 10 and named <= known, named - known


def test_the_metrics_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(kvferry_router_\w+?)(?:_total)?(?:\{([^}]*)\})?` \| (\w+) \| (.*) \|$", SECTION, flags=re.MULTILINE)
    assert rows == [(spec.name, ", ".join(spec.labels), spec.kind, spec.help) for spec in ROUTER_METRICS]


def test_numbers_of_the_page_are_those_of_the_code() -> None:
    assert f"`max_tokens` is {COMPLETION_TOKENS} where a completion does not say it, and {CHAT_TOKENS} for a chat" in SECTION


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("curl") and 'prompt": [' not in line])
async def test_curl_lines_for_vllm_work(line: str) -> None:
    path, body = curl(line)
    async with routing() as setup:
        answer = await (setup.client.get(path) if body is None else setup.client.post(path, body.encode()))
        assert answer.status == 200, answer.body


def test_there_are_curl_lines() -> None:
    assert sum(line.startswith("curl") for line in COMMANDS) == 4
