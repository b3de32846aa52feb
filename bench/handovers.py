"""Show where the time to first token goes in engine servers: every hand-over between processes and threads, with its time.

    python -m bench.handovers --setups one kvferry --json FILE [--lengths 512 8000] [--gpus 0 1] [-- SERVER ARGUMENTS]

Prompts go one at a time through the servers of `bench.engines`, of vLLM or with `--engine sglang` of SGLang.
`bench.handover_site` records the calls of some functions in all processes. Each row describes one such function in one process.
It shows the first and the last call for a prompt, in milliseconds after the client sent the prompt, and the number of calls until
the first token. All values are medians over the prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.engine_servers import Serving, Setup
from bench.engines import SETUP_KINDS, add_serving_arguments, prompts_of, serving_of
from bench.timing import Environment

SITE: Final = Path(__file__).with_name("handover_site")
OUTPUT_TOKENS: Final = 4
PAUSE_S: Final = 0.3
"""Pause between prompts, so that what a prompt leaves behind is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One function in one process.

    Attributes:
        role: route, prefill, decode, or the number of a single server.
        first_ms, last_ms: Times after the client sent the prompt.
        calls: Calls until the first token.
        prompts: Prompts with a call.
    """

    role: str
    label: str
    first_ms: float
    last_ms: float
    calls: float
    prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A prompt: when it was sent, and when its first token came, on the monotonic clock in ns."""

    begin_ns: int
    end_ns: int


def rows_of(folder: Path, windows: Sequence[Window]) -> list[Row]:
    """Return the rows of all prompts, in the order of their first calls."""
    calls: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in folder.iterdir():
        role = file.name.partition(".")[0]
        for line in file.read_text(encoding="utf-8").splitlines():
            at, _, label = line.partition("\t")
            for number, window in enumerate(windows):
                if window.begin_ns <= int(at) <= window.end_ns:
                    calls[role, label][number].append((int(at) - window.begin_ns) / 1e6)
    rows = [
        Row(
            role=role,
            label=label,
            first_ms=statistics.median(min(times) for times in prompts.values()),
            last_ms=statistics.median(max(times) for times in prompts.values()),
            calls=statistics.median(len(times) for times in prompts.values()),
            prompts=len(prompts),
        )
        for (role, label), prompts in calls.items()
    ]
    return sorted(rows, key=lambda row: row.first_ms)


async def traced(setup: Setup, prompt_tokens: int, number: int) -> list[Window]:
    """Send prompts one at a time.

    Raises:
        RuntimeError: A prompt failed.
    """
    windows = []
    prompts = prompts_of(prompt_tokens, 0, number=number + 3, seed=7)
    for at, prompt in enumerate(prompts):
        begin_ns = time.monotonic_ns()
        load = await setup.send([prompt], in_flight=1, output_tokens=OUTPUT_TOKENS, salt="handovers")
        (answer,) = load.answers
        if answer.error:
            raise RuntimeError(f"a prompt of {prompt_tokens} tokens failed: {answer.error}")
        if at >= 3:  # the first ones open sessions and compile
            windows.append(Window(begin_ns=begin_ns, end_ns=begin_ns + int(answer.ttft_s * 1e9)))
        await asyncio.sleep(PAUSE_S)
    return windows


def print_rows(setup: str, prompt_tokens: int, windows: Sequence[Window], rows: Sequence[Row], console: Console) -> None:
    first_ms = statistics.median((window.end_ns - window.begin_ns) / 1e6 for window in windows)
    table = Table(title=f"{setup}, {prompt_tokens} tokens: first token after {first_ms:.1f} ms", title_justify="left")
    for name in ("process", "hand-over"):
        table.add_column(name, no_wrap=True)
    for name in ("first, ms", "last, ms", "calls", "prompts"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        last = f"{row.last_ms:.1f}" if row.calls > 1 else ""
        table.add_row(row.role, row.label, f"{row.first_ms:.1f}", last, f"{row.calls:g}", f"{row.prompts} of {len(windows)}")
    console.print(table)


def run(arguments: argparse.Namespace, serving: Serving, console: Console) -> None:
    """Print the tables of all setups. If `--json` is given, write the record so far after each setup."""
    found: list[dict[str, Any]] = []
    for setup in arguments.setups:
        folder = Path(serving.environment["HANDOVERS"])
        for file in folder.iterdir():
            file.unlink()
        with SETUP_KINDS[arguments.engine](name=setup, serving=serving) as running:
            running.start()
            running.wait()
            for prompt_tokens in arguments.lengths:
                windows = asyncio.run(traced(running, prompt_tokens, arguments.requests))
                rows = rows_of(folder, windows)
                print_rows(setup, prompt_tokens, windows, rows, console)
                ttft_ms = [(window.end_ns - window.begin_ns) / 1e6 for window in windows]
                found.append(
                    {"setup": setup, "prompt_tokens": prompt_tokens, "ttft_ms": ttft_ms, "rows": [asdict(row) for row in rows]}
                )
        if arguments.json is not None:
            content = {
                "environment": Environment.here().to_json(),
                "engine": arguments.engine,
                "server_arguments": serving.arguments,
                "tp": arguments.tp,
                "gpus": arguments.gpus,
                "tables": found,
            }
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def recording(folder: Path) -> Mapping[str, str]:
    """Return the variables with which a process records its hand-overs in `folder`."""
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"HANDOVERS": str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Show where the time to first token goes in engine servers")
    add_serving_arguments(parser, setups=("one", "kvferry"), lengths=(512, 8000))
    parser.add_argument("--requests", type=int, default=10, help="prompts of each length")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record so far to FILE, after each setup")
    arguments = parser.parse_args()
    console = Console(width=140)
    with tempfile.TemporaryDirectory(prefix="kvferry-handovers-") as name:
        folder = Path(name)
        records = folder / "records"
        records.mkdir()
        serving = serving_of(parser, arguments, folder, recording(records))
        run(arguments, serving, console)


if __name__ == "__main__":
    main()
