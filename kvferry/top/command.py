"""`kvferry top`: show both tiers of a cluster, live on a terminal or once."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console

from kvferry.top.alerts import Alerts
from kvferry.top.cluster_watch import ClusterWatch
from kvferry.top.view import picture, view_to_json
from node_runtime import exit_codes
from transfer.registry.security import Security

BETWEEN_S: Final = 0.5
"""Time between the two looks of one picture, which show the rates of links."""
PLAIN_WIDTH: Final = 200
"""Columns without a terminal, so that a script finds each row on one line."""


async def run_top(addresses: Sequence[str], *, security: Security | None, is_once: bool, is_json: bool, every_s: float) -> int:
    """Show the cluster and return the exit code, which is 0 for a single picture if any node has answered.

    Raises:
        ConfigError: An address is invalid, or must not be called in plain text.
    """
    if not (is_once or is_json):
        return await _run_live(addresses, security=security, every_s=every_s)
    async with ClusterWatch(addresses, security=security, patience_s=None) as watch:
        watch.check_named()
        await watch.look()
        await asyncio.sleep(BETWEEN_S)
        view = await watch.look()
    alerts, _ = Alerts().update(view)
    if is_json:
        print(json.dumps(view_to_json(view, alerts), indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
        console.print(picture(view, alerts))
    return exit_codes.OK if any(node.status is not None for node in view.nodes) else exit_codes.UNAVAILABLE


async def _run_live(addresses: Sequence[str], *, security: Security | None, every_s: float) -> int:
    if importlib.util.find_spec("textual") is None:
        print("kvferry top: textual is missing; pip install 'kvferry[top]', or take --once or --json", file=sys.stderr)
        return exit_codes.FAILED
    from kvferry.top.app import TopApp

    async with ClusterWatch(addresses, security=security) as watch:
        watch.check_named()
        app = TopApp(watch, every_s=every_s)
        await app.run_async()
    return app.return_code or exit_codes.OK
