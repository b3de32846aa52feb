"""The plug-in that SGLang loads, as far as it can be seen without SGLang: what it hooks into was recorded from SGLang itself."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvferry.engines import sglang_backend
from kvferry.engines.sglang_backend import ANY_VERSION, BACKEND, GET_CLASS, HND_ADDRESSES, SCHEDULER, check_version
from kvferry.engines.sglang_transfers import Poll
from transfer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "recorded" / "sglang-0.5.23-interface.json").read_text(encoding="utf-8")
)
CLASSES = ast.parse((ROOT / "kvferry" / "engines" / "sglang_classes.py").read_text(encoding="utf-8"))
OURS = {
    "BaseKVManager": "KvferryManager",
    "BaseKVSender": "KvferrySender",
    "BaseKVReceiver": "KvferryReceiver",
}
INHERITED = {
    "BaseKVManager": {"should_verify_kv_checksum", "teardown"},
    "BaseKVSender": {"mark_prefill_complete", "get_max_transfer_tokens", "clear"},
    "BaseKVReceiver": {"is_abort_release_safe", "clear"},
}


def test_the_entry_point_is_the_plug_in() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {BACKEND: f"{sglang_backend.__name__}:activate"}


def test_states_are_sglangs() -> None:
    by_name = {name.replace("_", "").lower(): int(value) for name, value in Poll.__members__.items()}
    assert by_name == {name.lower(): value for name, value in RECORDED["states"].items()}


def test_all_that_it_hooks_into_is_there() -> None:
    assert set(RECORDED["hooked"]) == {GET_CLASS, HND_ADDRESSES, *SCHEDULER}
    assert RECORDED["hooked"][HND_ADDRESSES] == "(self)"
    assert re.match(r"\(transfer_backend: .*, class_type: ", RECORDED["hooked"][GET_CLASS])
    for target in SCHEDULER:
        wanted = "(self)" if target.endswith("_init_kv_manager") else "(self, req: "
        assert RECORDED["hooked"][target].startswith(wanted), target


@pytest.mark.parametrize("base", OURS)
def test_each_method_of_sglangs_interface_takes_sglangs_arguments(base: str) -> None:
    methods = methods_of(OURS[base])
    theirs: dict[str, str] = RECORDED["methods"][base]
    assert set(theirs) - set(methods) <= INHERITED[base], "SGLang's own does not know what to do"
    for name, signature in theirs.items():
        if name in methods:
            assert list(methods[name]) == parameters(signature), name


def test_a_class_for_each_kind() -> None:
    (table,) = [node for node in ast.walk(CLASSES) if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CLASSES"]
    assert isinstance(table.value, ast.Dict)
    kinds = {ast.literal_eval(key) for key in table.value.keys if key is not None}
    assert kinds | {"kvargs"} == set(RECORDED["kinds"])


@pytest.mark.parametrize(
    ("found", "environment", "is_taken"), [("0.5.23", "", True), ("0.5.24", "", False), ("0.6.0", "1", True)]
)
def test_another_version_is_refused_unless_told(
    monkeypatch: pytest.MonkeyPatch, found: str, environment: str, is_taken: bool
) -> None:
    monkeypatch.setattr(sglang_backend, "version", lambda _: found)
    monkeypatch.setenv(ANY_VERSION, environment)
    if is_taken:
        check_version()
    else:
        with pytest.raises(ConfigError, match=r"sglang is 0\.5\.24; kvferry's backend was tested with 0\.5\.23"):
            check_version()


def methods_of(name: str) -> dict[str, list[str]]:
    """Parameters of each method of one of our classes, which cannot be imported without SGLang."""
    (found,) = [node for node in CLASSES.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        one.name: [argument.arg for argument in (*one.args.args, *one.args.kwonlyargs)]
        for one in found.body
        if isinstance(one, ast.FunctionDef)
    }


def parameters(signature: str) -> list[str]:
    tree = ast.parse(f"def f{re.sub(r'<[^>]*>', 'None', signature)}: ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    return [argument.arg for argument in (*tree.args.args, *tree.args.kwonlyargs)]
