"""docs/protocol.md says what the code does: its tables are compared with messages, proto file and tests."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decode_node.peers import PrefillPeers
from decode_node.request_state import is_retried, verdict_of
from decode_node.requests import DecodeRequests
from node_runtime.leader_service import Leader
from prefill_node.joins import Joins
from transfer import errors
from transfer.breaker import Verdict
from transfer.instance import check_compatible
from transfer.logs import set_log_level
from transfer.messages import MESSAGE_TYPES, ChunkSize, IssuedGrant, Message
from transfer.registry.convert import chunk_plan_from_proto, instance_from_proto
from transfer.registry.server import TransferControlServicer
from transfer.registry.status import REASONS, status_of

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
RULES = [*map(str, range(1, 15)), *(f"R{number}" for number in range(1, 7))]


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, without its header."""
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def named_tests(pattern: str) -> set[str]:
    files = (ROOT / "tests").glob(pattern)
    return {name for file in files for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.M)}


def test_every_rule_has_its_tests_and_every_numbered_test_its_rule() -> None:
    documented = {row[0]: set(names(row[2])) for row in rows("Rules")}
    assert list(documented) == RULES
    found: dict[str, set[str]] = {rule: set() for rule in RULES}
    for test in named_tests("protocol/test_*rules.py"):
        match = re.match(r"test_(?:rule_0*(\d+)|(R\d))_", test)
        assert match, f"{test} carries no number of a rule"
        found[match[1] or match[2]].add(test)
    assert found == documented


def test_the_failure_table_names_tests_that_exist() -> None:
    table = rows("When things go wrong")
    with_processes = (
        "cluster/faults/test_*.py",
        "cluster/nodes/test_*.py",
        "serving/test_faults.py",
        "cluster/links/test_detection.py",
        "cluster/links/test_two_processes.py",
        "transport/cuda_ipc_scenarios.py",
    )
    tests_with_processes = set().union(*map(named_tests, with_processes))
    assert len(table) >= 9
    for row in table:
        shown = names(row[3])
        assert shown, f"{row[0]}: shown by nothing"
        assert set(shown) <= named_tests("**/test_*.py"), row[0]
        named = set(names(row[4]))
        assert named <= named_tests("**/test_*.py") | tests_with_processes, row[0]
        assert named & tests_with_processes or row[4] == "not needed" or row[4].startswith("not tested: "), row[0]


def test_every_error_is_in_the_table_of_tries_and_treated_as_it_says() -> None:
    documented = {name: row for row in rows("Another try") for name in names(row[1])}
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert set(documented) == set(kinds) - {"TransferError"}
    for name, row in documented.items():
        error = kinds[name]("")
        assert (row[2], row[3]) == tuple(
            "yes" if is_true else "no" for is_true in (is_retried(error), verdict_of(error) is Verdict.FAILURE)
        ), name


def test_the_reasons_are_those_of_the_code() -> None:
    documented = {names(row[0])[0]: row[1:] for row in rows("Reasons")}
    assert list(documented) == [reason.word for _, reason in REASONS]
    for kind, reason in REASONS:
        status, another_try = documented[reason.word]
        assert status == status_of(kind("")).name, reason
        if reason.retry_s is None:
            assert another_try == "no", reason
        else:
            assert re.match(r"at once" if reason.retry_s == 0 else rf"after {reason.retry_s:g} s$", another_try), reason


@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=lambda each: each.__name__)
def test_the_message_table_has_every_field_in_its_order(message_type: type[Message]) -> None:
    (row,) = [row for row in rows("Control messages") if names(row[0]) == [message_type.__name__]]
    assert int(row[1]) == message_type.tag
    assert row[2] == ("prefill" if message_type.tag <= 3 else "decode")
    expected: list[str] = []
    nested = {"chunks": tuple(ChunkSize.model_fields), "grants": tuple(IssuedGrant.model_fields)}
    for field in message_type.model_fields:
        expected.extend((field, *nested.get(field, ())))
    assert names(row[3]) == expected


def test_the_method_table_agrees_with_the_contract() -> None:
    contract = (ROOT / "proto" / "transfer" / "pb" / "kvferry.proto").read_text(encoding="utf-8")
    documented = {names(row[0].replace(".", "_"))[0]: row for row in rows("Registry plane")}
    found: dict[str, tuple[str, set[str]]] = {}
    for service, body in re.findall(r"^service (\w+) \{\n(.*?)^\}", contract, re.M | re.S):
        comment = ""
        for line in body.splitlines():
            if line.strip().startswith("//"):
                comment += line
            elif match := re.match(r"\s*rpc (\w+)\((stream )?\w+\) returns \((stream )?\w+\)", line):
                kinds = {(True, True): "two streams", (False, True): "server stream", (False, False): "unary"}
                codes = set(re.findall(r"\b([A-Z]+_[A-Z_]+|ABORTED|UNAVAILABLE|INTERNAL|CANCELLED)\b", comment))
                found[f"{service}_{match[1]}"] = (kinds[bool(match[2]), bool(match[3])], codes)
                comment = ""
    assert documented.keys() == found.keys()
    for method, (expected_kind, codes) in found.items():
        assert documented[method][1] == expected_kind, method
        assert set(re.findall(r"\b[A-Z_]{6,}\b", documented[method][2])) == codes, method


def codes_raised_by(function: Callable[..., Any]) -> set[str]:
    """Codes that a method ends with for the errors that the docstring of what it calls names."""
    raises = (inspect.getdoc(function) or "").split("Raises:")[1]
    return {status_of(getattr(errors, name)("")).name for name in re.findall(r"^ +(\w+): ", raises, re.M)}


def codes_written_in(method: Callable[..., Any]) -> set[str]:
    return set(re.findall(r"StatusCode\.(\w+)", inspect.getsource(method)))


def test_the_status_codes_are_those_that_the_code_ends_with() -> None:
    """A method that passes on whatever failed its request can end with the code of every error that there is."""
    of_any = {status_of(kind("")).name for kind in vars(errors).values() if isinstance(kind, type)}
    assert len(of_any) == 7
    attach, watermarks = TransferControlServicer.Attach, TransferControlServicer.Watermarks
    expected = {
        **dict.fromkeys(("NodeControl_Drain", "PrefillControl_Drain", "DecodeControl_Drain"), codes_written_in(Leader.Drain)),
        "NodeControl_ListRequests": codes_raised_by(Leader.requests_in_flight),
        "NodeControl_SetLogLevel": codes_raised_by(set_log_level),
        "NodeControl_Undrain": codes_written_in(Leader.Undrain),
        "NodeControl_SwitchRole": codes_written_in(Leader.SwitchRole) | codes_written_in(Leader._switch_when_drained),
        "PrefillControl_Join": set().union(*map(codes_raised_by, (instance_from_proto, check_compatible, Joins.open))),
        "PrefillControl_Abort": {status_of(errors.PeerUnreachable("")).name},  # at a node of two roles
        "PrefillControl_Prefill": of_any,
        "DecodeControl_Generate": of_any | {"CANCELLED", "DEADLINE_EXCEEDED"},
        "DecodeControl_Reserve": set().union(
            *map(codes_raised_by, (chunk_plan_from_proto, PrefillPeers.check_plan, DecodeRequests.reserve))
        ),
        "TransferControl_Attach": codes_written_in(attach) | of_any - {"ABORTED", "DATA_LOSS"},
        "TransferControl_Watermarks": codes_written_in(watermarks),
    }
    documented = {
        names(row[0].replace(".", "_"))[0]: set(re.findall(r"\b[A-Z_]{6,}\b", row[2])) for row in rows("Registry plane")
    }
    assert {method: codes for method, codes in documented.items() if codes} == expected
