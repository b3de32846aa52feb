"""The requests in flight of a node, as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from kvferry.cli.text_bars import text_table
from node_runtime.view_cells import Row, duration, state_badge, table_of
from transfer.pb import kvferry_pb2 as pb


def request_table(answer: pb.ListRequestsResponse, title: str) -> Table:
    """Return a row for each request, the oldest first."""
    left_out = answer.total - len(answer.requests)
    headings = ("request", "stage", "age", "with", ">prompt", ">ready", ">generated", ">ranks done", ">retries")
    rows = []
    for one in answer.requests:
        generated = f"{one.generated_tokens}/{one.max_new_tokens}" if one.max_new_tokens else "-"
        counts = (str(one.prompt_tokens), str(one.ready_tokens), generated, str(one.ranks_done), str(one.retries))
        rows.append(Row(cells=(one.request_id, state_badge(one.stage), duration(one.age_s), one.peer, *counts)))
    shown = f"{title}: {answer.total} in flight" + (f", {left_out} of them not shown" if left_out else "")
    return text_table(table_of(shown, headings, rows))


def requests_to_json(answer: pb.ListRequestsResponse) -> dict[str, Any]:
    """The answer as plain values, every field of every request."""
    shown = [{field.name: getattr(one, field.name) for field in one.DESCRIPTOR.fields} for one in answer.requests]
    return {"requests": shown, "total": answer.total}
