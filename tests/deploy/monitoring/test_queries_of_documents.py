"""PromQL of documents, in blocks with the language promql, reads declared metrics in valid ways."""

from __future__ import annotations

import re
from pathlib import Path

from tests.deploy.monitoring.promql_check import faults

DOCUMENTS = Path(__file__).resolve().parents[3] / "docs"


def queries_of(text: str) -> list[str]:
    """Return the queries of all blocks. A line that begins with a space continues the query before it."""
    blocks = re.findall(r"^ *```promql\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [query for block in blocks for query in re.split(r"\n(?! )", block.strip())]


def test_queries_read_declared_metrics() -> None:
    queries = {
        (document.name, query)
        for document in DOCUMENTS.glob("*.md")
        for query in queries_of(document.read_text(encoding="utf-8"))
    }
    assert len(queries) > 10
    assert {query: found for query in sorted(queries) if (found := faults(query[1]))} == {}
