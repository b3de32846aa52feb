"""Models have the stages and messages of the code, runs cover the models, and spin confirms two of them if installed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from docs.models import run as models
from docs.models.run import RUNS, Outcome
from transfer.messages import MESSAGE_TYPES
from transfer.receive import state as receiver_state
from transfer.ring import MAX_ATTEMPTS
from transfer.send import state as sender_state

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "models"
MODELS = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.pml"))}
BY_ID = {run.id: run for run in RUNS}
needs_spin = pytest.mark.skipif(
    bool(models.missing_tools()), reason="needs spin and gcc (apt-get install spin gcc): checks the protocol's models"
)


def enum_of(model: str, kind: str) -> list[str]:
    (found,) = re.findall(rf"mtype:{kind} = \{{ (.+?) \}}", MODELS[model])
    return re.split(r",\s*", found)


def test_the_models_have_the_stages_messages_and_attempts_of_the_code() -> None:
    text = MODELS["transfer"]
    # The code creates a piece when it asks for its grant. The model needs a stage before that.
    assert enum_of("transfer", "sender") == ["UNASKED", *(stage.name for stage in sender_state.SenderStage)]
    # The receiver keeps a piece from its grant to its release.
    assert enum_of("transfer", "receiver") == [
        "T_NONE",
        *(f"T_{stage.name}" for stage in receiver_state.ReceiverStage),
        "T_RELEASED",
    ]
    plane = text.split("/* The control plane")[1].split("#define send(m)")[0]
    assert set(re.findall(r"#define (\w+)\(", plane)) == {kind.__name__ for kind in MESSAGE_TYPES}
    assert re.findall(r"#define ATTEMPTS\s+(\d+)", text) == [str(MAX_ATTEMPTS)]


def test_every_rule_of_the_ring_is_asserted() -> None:
    assert set(MODELS) == {run.model for run in RUNS} == {"ring", "transfer", "sessions", "heartbeats"}
    lines = [line for text in MODELS.values() for line in text.splitlines() if "assert(" in line]
    asserted = {rule for line in lines for rule in re.findall(r"R[1-6]", line)}
    assert asserted == {f"R{number}" for number in range(1, 7)}


def test_every_planted_bug_has_a_run_and_every_size_is_used_by_its_model() -> None:
    assert len(BY_ID) == len(RUNS)
    for model, text in MODELS.items():
        runs = [run for run in RUNS if run.model == model]
        planted = set(re.findall(r"\bBUG_\w+", text))
        assert planted == {size for run in runs if run.finds for size in run.sizes if size.startswith("BUG_")}
        for run in runs:
            for size in run.sizes:
                assert re.search(rf"#if(n?def| defined\() ?{size.split('=')[0]}\b", text), f"{run.id}: {size}"
            assert run.claim is None or f"ltl {run.claim} " in text


HOLDS = Outcome(is_complete=True, error="", num_states=9, depth=3, num_steps=0, seconds=0.1)
FINDS = replace(HOLDS, error="assertion violated (user[i]==255)", num_steps=7)
INCOMPLETE = replace(HOLDS, is_complete=False)


@pytest.mark.parametrize(
    ("name", "outcome", "is_expected", "words"),
    [
        ("ring.rules", FINDS, False, "FAILS: assertion violated (user[i]==255)"),
        ("ring.rules", INCOMPLETE, False, "NOT COMPLETE: out of time, memory or depth"),
        ("ring.timeout", HOLDS, False, "NOT FOUND"),
    ],
)
def test_a_verdict_passes_only_for_a_complete_search_with_the_expected_result(
    name: str, outcome: Outcome, is_expected: bool, words: str
) -> None:
    assert models.verdict(BY_ID[name], outcome) == (is_expected, words)


@needs_spin
def test_a_small_model_holds_and_the_planted_release_on_timeout_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["--only", "transfer.two_sided", "--quick", "--jobs", "1"]) == 0
    assert models.main(["--only", "ring.timeout"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"transfer\.two_sided .* holds\n", output)
    assert re.search(r"ring\.timeout .* found, \d+ steps\n", output)
