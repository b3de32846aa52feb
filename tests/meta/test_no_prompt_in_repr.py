"""No prompt in logs: dataclasses leave the fields of a prompt out of their repr."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPT_FIELDS = {"token_ids", "cache_salt"}


def test_no_dataclass_shows_a_prompt_in_its_repr() -> None:
    """Logs of unexpected errors contain the repr of what failed, and prompts belong to users."""
    shown = []
    for folder in ("transfer", "node_runtime", "prefill_node", "decode_node", "kvferry/engines", "embedded_engine"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list):
                    shown += [
                        f"{file.relative_to(ROOT)}: {node.name}.{ast.unparse(line)}"
                        for line in node.body
                        if isinstance(line, ast.AnnAssign)
                        and ast.unparse(line.target) in PROMPT_FIELDS
                        and "repr=False" not in ast.unparse(line)
                    ]
    assert shown == []
