"""`kvferry node ...`: what an operator does to a node that runs."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kvferry.cli import exit_codes
from kvferry.cli.options import JsonFlag, Target, TlsOptions, check_timeout, with_tls
from kvferry.cli.text_command import TextTyper
from transfer.errors import PeerUnreachable

if TYPE_CHECKING:
    from kvferry.cli.node_client import NodeClient

node_app = TextTyper(
    no_args_is_help=True, help="Drain a node, look at its requests, abort one, change its role or its log level."
)

RequestId = Annotated[str, typer.Argument(help="The client's request id, or a transfer's.")]


@node_app.command()
@with_tls
def drain(
    target: Target,
    timeout: Annotated[float, typer.Option(help="Seconds that requests in flight get.")] = 30.0,
    *,
    tls: TlsOptions,
) -> None:
    """Take no new requests, and wait until those in flight are over; exit code 6 where some are left. The node stays drained."""

    async def work(client: NodeClient) -> int:
        check_timeout(timeout)
        remaining = await client.drain(budget_s=timeout)
        if remaining:
            print(f"{target} drains; {remaining} requests are still in flight after {timeout:g} s", file=sys.stderr)
            return exit_codes.TOO_LATE
        try:
            status = await client.status()
        except PeerUnreachable:  # one that is being stopped ends with its last request
            print(f"{target} is drained, and has ended")
            return exit_codes.OK
        if not status.draining and status.state != "draining":
            print(f"{target} has nothing in flight, and takes requests: its drain was undone meanwhile", file=sys.stderr)
            return exit_codes.FAILED
        print(f"{target} is drained")
        return exit_codes.OK

    _run("drain", target, tls, work)


@node_app.command()
@with_tls
def undrain(
    target: Target,
    *,
    tls: TlsOptions,
) -> None:
    """Take requests again."""

    async def work(client: NodeClient) -> int:
        was_draining = await client.undrain()
        print(f"{target} takes requests again" if was_draining else f"{target} was not draining")
        return exit_codes.OK

    _run("undrain", target, tls, work)


@node_app.command()
@with_tls
def requests(
    target: Target,
    limit: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The oldest so many; 0: as many as an answer holds.")] = 0,
    json: JsonFlag = False,
    *,
    tls: TlsOptions,
) -> None:
    """Show the requests in flight, the oldest first."""

    async def work(client: NodeClient) -> int:
        from rich.console import Console

        from kvferry.cli.request_table import request_table, requests_to_json

        answer = await client.list_requests(limit)
        if json:
            print(json_module.dumps(requests_to_json(answer), indent=2))
        else:
            Console().print(request_table(answer, target))
        return exit_codes.OK

    _run("requests", target, tls, work)


@node_app.command()
@with_tls
def abort(
    target: Target,
    request_id: RequestId,
    reason: Annotated[str, typer.Option(help="One line, for whoever waits for the request.")] = "",
    *,
    tls: TlsOptions,
) -> None:
    """Give a request up; exit code 1 where no such request is in flight."""

    async def work(client: NodeClient) -> int:
        if await client.abort(request_id, reason=reason):
            print(f"{request_id} is aborted")
            return exit_codes.OK
        print(f"{target} has no request {request_id} in flight", file=sys.stderr)
        return exit_codes.FAILED

    _run("abort", target, tls, work)


@node_app.command("switch-role")
@with_tls
def switch_role(
    target: Target,
    role: Annotated[str, typer.Argument(help="prefill or decode.")],
    timeout: Annotated[float, typer.Option(help="Seconds that requests in flight get.")] = 60.0,
    *,
    tls: TlsOptions,
) -> None:
    """Make a prefill node a decode node, or the other way about, where it has settings for that (other_role)."""

    async def work(client: NodeClient) -> int:
        check_timeout(timeout)  # 0 seconds mean to the node: as long as its own settings allow
        answer = await client.switch_role(role, budget_s=timeout)
        before = f"before: {answer.role_before}" if answer.role_before != answer.role else "as before"
        print(f"{target} is a {answer.role} node ({before}), incarnation {answer.incarnation:#018x}")
        if (await client.status()).draining:
            print(f"it was told to drain, and takes no requests: kvferry node undrain --target {target}")
        return exit_codes.OK

    _run("switch-role", target, tls, work)


@node_app.command("log-level")
@with_tls
def log_level(
    target: Target,
    level: Annotated[str, typer.Argument(help="debug, info, warning or error.")],
    *,
    tls: TlsOptions,
) -> None:
    """Change what the node and its ranks write to their logs."""

    async def work(client: NodeClient) -> int:
        before = await client.set_log_level(level)
        print(f"{target} writes {level} (before: {before})")
        return exit_codes.OK

    _run("log-level", target, tls, work)


def _run(command: str, target: str, tls: TlsOptions, work: Callable[[NodeClient], Awaitable[int]]) -> NoReturn:
    """Call the node; end the command with the exit code of `work`.

    Raises:
        TransferError: The call failed.
    """
    from kvferry.cli.node_client import NodeClient
    from kvferry.cli.signals import run_until_signalled

    async def call() -> int:
        async with NodeClient(target, security=tls.security(f"node {command}", target)) as client:
            return await work(client)

    raise typer.Exit(run_until_signalled(call))
