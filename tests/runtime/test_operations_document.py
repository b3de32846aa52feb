"""docs/operations.md says what the code does: its tables are compared, and what it speaks of exists."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from node_runtime import exit_codes
from transfer.config import DecodeNodeConfig, PrefillNodeConfig, settings
from transfer.metrics import NODE_METRICS, RANK_METRICS
from transfer.role_settings import KEPT, load_other_role
from transfer.tracing import SPANS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "operations.md"


def text() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


def test_every_metric_that_is_spoken_of_exists() -> None:
    known = {spec.shown_name for spec in (*RANK_METRICS, *NODE_METRICS)}
    spoken = set(re.findall(r"kvferry_[a-z_]+", text()))
    assert spoken - known == set()


def test_every_span_is_explained() -> None:
    row = re.compile(r"^\| `(kvferry\.[a-z_]+)` \| ([a-z ]+) \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)
    told = [
        (name, who, parent.replace("`", ""), meaning, tuple(re.findall(r"`(\w+)`", attributes)))
        for name, who, parent, meaning, attributes in row.findall(text())
    ]
    assert told == [(one.name, one.recorded_by, one.parent, one.meaning, one.attributes) for one in SPANS]


def test_every_exit_code_is_explained() -> None:
    rows = {int(code): name for code, name in re.findall(r"^\| (\d) \| `([A-Z_]+)` \|", text(), re.MULTILINE)}
    assert rows == {value: name for name, value in vars(exit_codes).items() if name.isupper()}


def test_every_setting_that_is_spoken_of_exists() -> None:
    known = {path for config in (PrefillNodeConfig, DecodeNodeConfig) for path, _ in settings(config)}
    sections = {path.partition(".")[0] for path in known if "." in path}
    spoken = {name for name in re.findall(r"`([a-z_]+\.[a-z_.]+)`", text()) if name.partition(".")[0] in sections}
    assert len(spoken) > 10 and spoken - known == set()


def test_the_settings_files_are_right(tmp_path: Path) -> None:
    prefill, decode, *_ = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text(), re.DOTALL))
    assert PrefillNodeConfig.model_validate(prefill).server.port == 7001
    peers = DecodeNodeConfig.model_validate(decode).peers.prefill_nodes
    assert peers == (f"{prefill['server']['advertise_host']}:{prefill['server']['port']}",)


def test_the_settings_of_the_other_role_are_right(tmp_path: Path) -> None:
    (decode,) = [block for block in re.findall(r"```yaml\n(.*?)```", text(), re.DOTALL) if "prefill_nodes: [" in block]
    (other,) = re.findall(r"`as-prefill\.yaml`.*?```yaml\n(.*?)```", text(), re.DOTALL)
    file = tmp_path / "as-prefill.yaml"
    file.write_text(other)
    own = DecodeNodeConfig.model_validate(yaml.safe_load(decode) | {"other_role": file})
    loaded = load_other_role(own)
    assert isinstance(loaded, PrefillNodeConfig)
    assert (loaded.chunk.chunk_tokens, loaded.pool.page_size, own.pool.page_size) == (256, 16, 32)
    shown = re.search(r"(`model`, `engine`[^.]*?) cannot differ", text())
    assert shown is not None and set(re.findall(r"`(\w+)`", shown[1])) == set(KEPT)


def test_every_event_that_is_listed_is_logged() -> None:
    listed = re.search(r"\| event \| means \|\n(.*?)\n\n", text(), re.DOTALL)
    assert listed is not None
    event = re.compile(r"`([a-z]+_[a-z_]+|draining|stopped)`")
    events = {name for row in listed[1].splitlines() for name in event.findall(row.split("|")[1])}
    code = "".join(
        file.read_text(encoding="utf-8")
        for package in ("node_runtime", "prefill_node", "decode_node", "embedded_engine", "transfer")
        for file in (ROOT / package).rglob("*.py")
    )
    logged = set(re.findall(r"log\.[a-z]+\(\s*\"([a-z_]+)\"", code))
    assert len(events) > 12 and events - logged == set()
