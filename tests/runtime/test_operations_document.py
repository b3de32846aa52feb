"""Tables and settings files of docs/operations.md that the code defines."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from node_runtime import exit_codes
from transfer.config import DecodeNodeConfig, PrefillNodeConfig
from transfer.role_settings import load_other_role
from transfer.tracing import SPANS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def test_every_span_is_explained() -> None:
    row = re.compile(r"^\| `(kvferry\.[a-z_]+)` \| ([a-z ]+) \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)
    told = [
        (name, who, parent.replace("`", ""), meaning, tuple(re.findall(r"`(\w+)`", attributes)))
        for name, who, parent, meaning, attributes in row.findall(TEXT)
    ]
    assert told == [(one.name, one.recorded_by, one.parent, one.meaning, one.attributes) for one in SPANS]


def test_every_exit_code_is_explained() -> None:
    rows = {int(code): name for code, name in re.findall(r"^\| (\d) \| `([A-Z_]+)` \|", TEXT, re.MULTILINE)}
    assert rows == {value: name for name, value in vars(exit_codes).items() if name.isupper()}


def test_the_settings_files_are_accepted(tmp_path: Path) -> None:
    prefill, decode, *_ = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL))
    assert PrefillNodeConfig.model_validate(prefill).server.port == 7001
    assert DecodeNodeConfig.model_validate(decode).peers.prefill_nodes
    (own,) = [block for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL) if "prefill_nodes: [" in block]
    (other,) = re.findall(r"`as-prefill\.yaml`.*?```yaml\n(.*?)```", TEXT, re.DOTALL)
    file = tmp_path / "as-prefill.yaml"
    file.write_text(other)
    assert isinstance(
        load_other_role(DecodeNodeConfig.model_validate(yaml.safe_load(own) | {"other_role": file})), PrefillNodeConfig
    )
