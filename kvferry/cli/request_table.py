"""The requests in flight of a node, as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from kvferry.cli.text_bars import printable
from transfer.pb import kvferry_pb2 as pb


def request_table(answer: pb.ListRequestsResponse, title: str) -> Table:
    """One row a request, the oldest first; what others wrote is shown as text, neither as markup nor as orders to a terminal."""
    left_out = answer.total - len(answer.requests)
    table = Table(title=f"{title}: {answer.total} in flight" + (f", {left_out} of them not shown" if left_out else ""))
    for heading in ("request", "stage", "age", "with"):
        table.add_column(heading, overflow="fold")
    for heading in ("prompt", "ready", "generated", "ranks done", "retries"):
        table.add_column(heading, justify="right")
    for request in answer.requests:
        generated = f"{request.generated_tokens}/{request.max_new_tokens}" if request.max_new_tokens else "-"
        table.add_row(
            printable(request.request_id),
            printable(request.stage),
            f"{request.age_s:.1f} s",
            printable(request.peer),
            str(request.prompt_tokens),
            str(request.ready_tokens),
            generated,
            str(request.ranks_done),
            str(request.retries),
        )
    return table


def requests_to_json(answer: pb.ListRequestsResponse) -> dict[str, Any]:
    """The answer as plain values, every field of every request."""
    shown = [{field.name: getattr(one, field.name) for field in one.DESCRIPTOR.fields} for one in answer.requests]
    return {"requests": shown, "total": answer.total}
