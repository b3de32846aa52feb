"""`kvferry node ...`: commands of an operator for a node that runs."""

from __future__ import annotations

import json as json_module
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.options import JsonFlag, Target, TlsOptions, check_timeout, check_word, with_options
from kvferry.cli.text_command import TextTyper
from node_runtime import exit_codes
from node_runtime.command_line import example
from transfer.errors import PeerUnreachable

if TYPE_CHECKING:
    from kvferry.cli.node_client import NodeClient

node_app = TextTyper(help="Operate a node: drain it, list or abort its requests, change its role or its log level.")


def _client(command: str, target: str, tls: TlsOptions) -> NodeClient:
    from kvferry.cli.node_client import NodeClient

    return NodeClient(target, security=tls.security(f"node {command}", target))


@node_app.command(epilog=example("kvferry node drain --timeout 60 --target 127.0.0.1:7100 --insecure"))
@with_options
async def drain(
    target: Target,
    timeout: Annotated[float, typer.Option(help="Seconds to finish requests in flight.")] = 30.0,
    *,
    tls: TlsOptions,
) -> int:
    """Accept no new requests, and wait until those in flight end. The exit code is 6 if some remain. The node stays drained."""
    async with _client("drain", target, tls) as client:
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


@node_app.command(epilog=example("kvferry node undrain --target 127.0.0.1:7100 --insecure"))
@with_options
async def undrain(target: Target, *, tls: TlsOptions) -> None:
    """Accept requests again."""
    async with _client("undrain", target, tls) as client:
        was_draining = await client.undrain()
    print(f"{target} takes requests again" if was_draining else f"{target} was not draining")


@node_app.command(epilog=example("kvferry node requests --json --target 127.0.0.1:7100 --insecure"))
@with_options
async def requests(
    target: Target,
    limit: Annotated[
        int,
        typer.Option(min=0, max=2**32 - 1, help="Number of requests, the oldest first; 0 shows all that fit into one answer."),
    ] = 0,
    json: JsonFlag = False,
    *,
    tls: TlsOptions,
) -> None:
    """Show the requests in flight, the oldest first."""
    from rich.console import Console

    from kvferry.cli.status_view import request_table
    from transfer.registry.plain_values import plain

    async with _client("requests", target, tls) as client:
        answer = await client.list_requests(limit)
    if json:
        print(json_module.dumps(plain(answer), indent=2))
    else:
        Console().print(request_table(answer, target))


@node_app.command(epilog=example("kvferry node abort REQUEST_ID --target 127.0.0.1:7100 --insecure"))
@with_options
async def abort(
    target: Target,
    request_id: Annotated[str, typer.Argument(help="Id of the request or of its transfer.")],
    reason: Annotated[str, typer.Option(help="One line for the client of the request.")] = "",
    *,
    tls: TlsOptions,
) -> int:
    """Abort a request. The exit code is 1 if it is not in flight."""
    async with _client("abort", target, tls) as client:
        is_found = await client.abort(request_id, reason=reason)
    if is_found:
        print(f"{request_id} is aborted")
        return exit_codes.OK
    print(f"{target} has no request {request_id} in flight", file=sys.stderr)
    return exit_codes.FAILED


@node_app.command("switch-role", epilog=example("kvferry node switch-role prefill --target 127.0.0.1:7100 --insecure"))
@with_options
async def switch_role(
    target: Target,
    role: Annotated[str, typer.Argument(help="prefill or decode.")],
    timeout: Annotated[float, typer.Option(help="Seconds to finish requests in flight.")] = 60.0,
    *,
    tls: TlsOptions,
) -> None:
    """Change a prefill node to a decode node, or back. The node needs settings for both roles (other_role)."""
    check_word("ROLE", role, ("prefill", "decode"))
    async with _client("switch-role", target, tls) as client:
        check_timeout(timeout)  # 0 seconds mean to the node: as long as its own settings allow
        answer = await client.switch_role(role, budget_s=timeout)
        before = f"before: {answer.role_before}" if answer.role_before != answer.role else "as before"
        print(f"{target} is a {answer.role} node ({before}), incarnation {answer.incarnation:#018x}")
        if (await client.status()).draining:
            print(f"it was told to drain, and takes no requests: kvferry node undrain --target {target}")


@node_app.command("log-level", epilog=example("kvferry node log-level debug --target 127.0.0.1:7100 --insecure"))
@with_options
async def log_level(
    target: Target,
    level: Annotated[str, typer.Argument(help="debug, info, warning or error.")],
    *,
    tls: TlsOptions,
) -> None:
    """Change the log level of the node and its ranks."""
    check_word("LEVEL", level, ("debug", "info", "warning", "error"))
    async with _client("log-level", target, tls) as client:
        before = await client.set_log_level(level)
    print(f"{target} writes {level} (before: {before})")
