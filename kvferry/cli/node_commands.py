"""`kvferry node ...`: what an operator does to a node that runs."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli import exit_codes
from kvferry.cli.options import ConfigFile, Insecure, JsonFlag, PeerName, Target, TlsCa, TlsCert, TlsKey, check_timeout
from kvferry.cli.text_command import TextTyper
from transfer.errors import PeerUnreachable, TransferError

if TYPE_CHECKING:
    from kvferry.cli.node_client import NodeClient

node_app = TextTyper(
    no_args_is_help=True, help="Drain a node, look at its requests, abort one, change its role or its log level."
)

RequestId = Annotated[str, typer.Argument(help="The client's request id, or a transfer's.")]


@node_app.command()
def drain(
    target: Target,
    timeout: Annotated[float, typer.Option(help="Seconds that requests in flight get.")] = 30.0,
    config: ConfigFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    peer_name: PeerName = None,
    insecure: Insecure = 0,
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

    _run("drain", target, work, config, tls_cert, tls_key, tls_ca, peer_name, insecure)


@node_app.command()
def undrain(
    target: Target,
    config: ConfigFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    peer_name: PeerName = None,
    insecure: Insecure = 0,
) -> None:
    """Take requests again."""

    async def work(client: NodeClient) -> int:
        was_draining = await client.undrain()
        print(f"{target} takes requests again" if was_draining else f"{target} was not draining")
        return exit_codes.OK

    _run("undrain", target, work, config, tls_cert, tls_key, tls_ca, peer_name, insecure)


@node_app.command()
def requests(
    target: Target,
    limit: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The oldest so many; 0: as many as an answer holds.")] = 0,
    json: JsonFlag = False,
    config: ConfigFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    peer_name: PeerName = None,
    insecure: Insecure = 0,
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

    _run("requests", target, work, config, tls_cert, tls_key, tls_ca, peer_name, insecure)


@node_app.command()
def abort(
    target: Target,
    request_id: RequestId,
    reason: Annotated[str, typer.Option(help="One line, for whoever waits for the request.")] = "",
    config: ConfigFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    peer_name: PeerName = None,
    insecure: Insecure = 0,
) -> None:
    """Give a request up; exit code 1 where no such request is in flight."""

    async def work(client: NodeClient) -> int:
        if await client.abort(request_id, reason=reason):
            print(f"{request_id} is aborted")
            return exit_codes.OK
        print(f"{target} has no request {request_id} in flight", file=sys.stderr)
        return exit_codes.FAILED

    _run("abort", target, work, config, tls_cert, tls_key, tls_ca, peer_name, insecure)


@node_app.command("switch-role")
def switch_role(
    target: Target,
    role: Annotated[str, typer.Argument(help="prefill or decode.")],
    timeout: Annotated[float, typer.Option(help="Seconds that requests in flight get.")] = 60.0,
    config: ConfigFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    peer_name: PeerName = None,
    insecure: Insecure = 0,
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

    _run("switch-role", target, work, config, tls_cert, tls_key, tls_ca, peer_name, insecure)


@node_app.command("log-level")
def log_level(
    target: Target,
    level: Annotated[str, typer.Argument(help="debug, info, warning or error.")],
    config: ConfigFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    peer_name: PeerName = None,
    insecure: Insecure = 0,
) -> None:
    """Change what the node and its ranks write to their logs."""

    async def work(client: NodeClient) -> int:
        before = await client.set_log_level(level)
        print(f"{target} writes {level} (before: {before})")
        return exit_codes.OK

    _run("log-level", target, work, config, tls_cert, tls_key, tls_ca, peer_name, insecure)


def _run(
    command: str,
    target: str,
    work: Callable[[NodeClient], Awaitable[int]],
    config: Path | None,
    cert: Path | None,
    key: Path | None,
    ca: Path | None,
    peer_names: list[str] | None,
    insecure: int,
) -> None:
    """Call the node; ends the command with the exit code of `work`, or of its error."""
    from kvferry.cli.client_settings import client_security
    from kvferry.cli.node_client import NodeClient
    from kvferry.cli.signals import run_until_signalled

    async def call() -> int:
        security = client_security(
            f"node {command}", target, file=config, cert=cert, key=key, ca=ca, peer_names=peer_names, insecure=insecure
        )
        async with NodeClient(target, security=security) as client:
            return await work(client)

    async def told() -> int:
        try:
            return await call()
        except TransferError as error:
            for line in str(error).splitlines():
                print(f"kvferry node {command}: {line}", file=sys.stderr)
            return exit_codes.exit_code_of(error)

    raise typer.Exit(run_until_signalled(told))
