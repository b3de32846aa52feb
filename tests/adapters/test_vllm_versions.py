"""The recorded interface of vLLM, beside the code that uses it. tests/vllm compares it with an installed vLLM."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvferry.engines.vllm_settings import check_version
from kvferry.engines.vllm_versions import ALL, USED, differences, read_recorded

ENGINES = Path(__file__).resolve().parents[2] / "kvferry" / "engines"
INTERFACE: dict[str, str] = read_recorded()["interface"]
BASES = {
    "KvferryConnector": "KVConnectorBase_V1",
    "KvferryStoreConnector": "OffloadingConnector",
    "FirstTokenScheduler": "Scheduler",
    "StoreTier": "SecondaryTierManager",
    "StoreOffloadingSpec": "TieringOffloadingSpec",
    "HostWorker": "OffloadingWorker",
}
PATHS = {path.rpartition(":")[2]: path for path in USED}


def imported() -> set[str]:
    """Names that the connectors import from vLLM."""
    found = set()
    for path in ENGINES.glob("vllm_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return found


def our_methods(name: str) -> dict[str, ast.arguments]:
    """Parameters of each method of one of our classes, which cannot be imported without vLLM."""
    modules = [ast.parse(path.read_text(encoding="utf-8")) for path in ENGINES.glob("vllm_*.py")]
    (found,) = [node for module in modules for node in module.body if isinstance(node, ast.ClassDef) and node.name == name]
    methods = [one for one in found.body if isinstance(one, ast.FunctionDef) and one.name != "__init__"]
    return {one.name: one.args for one in methods}


def test_each_imported_name_is_compared() -> None:
    assert imported() <= USED.keys()


def test_each_name_that_is_used_is_recorded() -> None:
    """A name that is misspelled here would be absent in each vLLM, and never be reported."""
    named = {f"{path}.{name}" for path, names in USED.items() for name in names if name not in ALL}
    assert named | USED.keys() <= INTERFACE.keys()


def test_the_recorded_vllm_is_supported() -> None:
    check_version(read_recorded()["vllm"], allow_untested=False)


@pytest.mark.parametrize("ours", BASES)
def test_overrides_have_the_parameters_of_vllm(ours: str) -> None:
    """By position and name, as vLLM passes them."""
    path, compared = PATHS[BASES[ours]], 0
    for name, parameters in our_methods(ours).items():
        theirs = INTERFACE.get(f"{path}.{name}", "")
        if not theirs.startswith("method("):
            continue
        wanted = [one.partition("=")[0].strip() for one in theirs[len("method(") : -1].split(",")]
        wanted = [one for one in wanted if not one.startswith(("*", "/"))]
        have = [one.arg for one in (*parameters.args, *parameters.kwonlyargs)]
        assert have[: len(wanted)] == (wanted[: len(have)] if parameters.vararg else wanted), name
        num_defaults = len(parameters.defaults) + len(parameters.kw_defaults)
        assert len(have) - num_defaults <= len(wanted), f"{name} needs more than vLLM passes"
        compared += 1
    assert compared


def test_each_kind_of_difference_is_a_line() -> None:
    hook, field = "m:Base.hook", "m:Spec.rows"
    before = {"m:Base": "class", hook: "method(self, request)", field: "field"}
    after = {"m:Base": "class", hook: "method(self, request, blocks)", "m:Base.new": "method(self)"}
    assert list(differences(before, before)) == []
    assert list(differences(before, after)) == [
        "~ m:Base.hook: method(self, request) -> method(self, request, blocks)",
        "+ m:Base.new: method(self)",
        "- m:Spec.rows: field",
    ]
