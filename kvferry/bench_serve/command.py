"""`kvferry bench serve`: run the rates one after the other, and report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from kvferry.bench_serve.generator import OpenLoop
from kvferry.bench_serve.options import LoadOptions, Run
from kvferry.bench_serve.picture import check_picture, write_picture
from kvferry.bench_serve.report import LoadReport, machine, print_report
from kvferry.bench_serve.summary import RateSummary, summarise
from kvferry.bench_serve.workload import Planned, Prompts, longest_prompt
from kvferry.cli.json_report import check_writable, is_standard_output, write_report
from kvferry.cli.node_client import NodeClient
from node_runtime import exit_codes
from transfer.errors import ConfigError, PeerUnreachable
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import transport_names
from transfer.registry.security import Security


async def run_bench_serve(
    options: LoadOptions, *, security: Security | None = None, json_file: Path | None = None, plot: Path | None = None
) -> int:
    """Put the load on the nodes, print the outcome, and return the exit code. If it is cancelled, it reports the partial outcome.

    Raises:
        TransferError: See `put_load`, or a file cannot be written.
    """
    if plot is not None:
        check_picture(plot)
    check_writable(json_file)
    report = await put_load(options, security=security, on_broken_off=lambda partial: _publish(partial, json_file, plot))
    _publish(report, json_file, plot)
    if report.is_late or not any(one.served for one in report.summaries):
        return exit_codes.FAILED
    return exit_codes.OK


async def put_load(
    options: LoadOptions,
    *,
    security: Security | None = None,
    on_broken_off: Callable[[LoadReport], None] = lambda partial: None,
) -> LoadReport:
    """Run the rates one after the other.

    Args:
        on_broken_off: Receives the partial report if this is cancelled.

    Raises:
        TransferError: A node does not answer, is no decode node, or takes no requests; or an option is invalid.
    """
    summaries: list[RateSummary] = []
    runs = options.runs()
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            address: await stack.enter_async_context(NodeClient(address, security=security)) for address in options.targets or ()
        }
        nodes = [await _described(client) for client in clients.values()]
        prompts = Prompts(
            vocab_size=_vocab_size(options, nodes),
            shape=options.shape,
            longest=max(longest_prompt(run.planned) for run in runs),
            seed=options.fixed_seed,
        )
        load_before, date = os.getloadavg()[0], datetime.now(UTC).isoformat(timespec="seconds")

        def report(*, is_interrupted: bool = False) -> LoadReport:
            return LoadReport(
                summaries=summaries,
                objectives=options.objectives,
                settings=options.to_json(),
                nodes=nodes,
                machine=machine(),
                command=shlex.join(["kvferry", *sys.argv[1:]]),
                date=date,
                load_before=load_before,
                is_interrupted=is_interrupted,
            )

        try:
            for run in runs:
                await _run(options, clients, prompts, run, summaries)
        except asyncio.CancelledError:
            if summaries:
                on_broken_off(report(is_interrupted=True))
            raise
        return report()


async def _run(
    options: LoadOptions, clients: Mapping[str, NodeClient], prompts: Prompts, run: Run, summaries: list[RateSummary]
) -> None:
    """Run one rate and add its summary, also if it is cancelled."""
    number = sum(not one.is_warm_up for one in run.planned)
    print(
        f"{run.rate:g}/s: {number:,} requests over {run.window_s():,.1f} s, after {len(run.planned) - number:,} of warm-up",
        file=sys.stderr,
        flush=True,
    )
    loop = OpenLoop(clients, choice=options.choice, timeout_s=options.timeout_s, max_lateness_s=options.max_lateness_s)

    def make(index: int, one: Planned) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompts.of(run.name, index, one.prompt_tokens)),
            max_new_tokens=one.output_tokens,
            sampling=pb.SamplingParams(temperature=options.temperature, top_p=1.0, seed=options.fixed_seed),
            ignore_eos=True,
        )

    is_whole = False
    try:
        await loop.run(run.planned, make)
        is_whole = True
    finally:
        if any(not record.is_warm_up for record in loop.records):
            summaries.append(
                summarise(
                    loop.records,
                    rate=run.rate,
                    window_s=run.window_s() if is_whole else run.window_s(loop.ran_s),
                    objectives=options.objectives,
                    lateness=loop.lateness(),
                    is_partial=not is_whole,
                )
            )


async def _described(client: NodeClient) -> dict[str, Any]:
    """Describe a decode node.

    Raises:
        TransferError: It does not answer, is no decode node, or takes no requests.
    """
    status = await client.status()
    if status.role != "decode":
        raise ConfigError(f"--target {client.address} is a {status.role} node; requests go to decode nodes")
    if not status.ready:
        raise PeerUnreachable(f"{client.address} takes no requests: {status.not_ready_reason or status.state}")
    instance = status.instance
    return {
        "address": client.address,
        "version": instance.version,
        "transport": ", ".join(transport_names(instance)),
        "tp_size": instance.shard.tp_size,
        "page_size": instance.shard.page_size,
        "dtype": instance.shard.dtype,
        "model_fingerprint": instance.model_fingerprint,
        "vocab_size": instance.model_fields.get("vocab_size"),
        "prefill_nodes": [peer.address for peer in status.peers if peer.state == "joined"],
        "link_bandwidth_bytes_per_s": [link.bandwidth_bytes_per_s for link in status.links],
    }


def _vocab_size(options: LoadOptions, nodes: list[dict[str, Any]]) -> int:
    if options.vocab_size is not None:
        return options.vocab_size
    told = [node["vocab_size"] for node in nodes]
    if not all(isinstance(one, str) and one.isdigit() and int(one) > 1 for one in told):
        raise ConfigError("the nodes do not report the vocabulary size; set --vocab-size")
    return min(map(int, told))


def _publish(report: LoadReport, json_file: Path | None, plot: Path | None) -> None:
    print_report(report, Console(highlight=False, stderr=is_standard_output(json_file)))
    write_report(report.to_json(), json_file)
    if plot is not None:
        write_picture(report, plot)
        print(f"wrote {plot}", file=sys.stderr)
