"""docs/scaling.md says what its figures rest on, and its figures are those of the record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import simulate as command
from bench.scaling import predicted_again
from transfer.config import ChunkConfig, DecodeLimitsConfig, LimitsConfig, PrefillLimitsConfig, RingConfig, StagingConfig
from transfer.memory.node_plan import ring_capacity_bytes

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
RECORD: dict[str, Any] = json.loads((ROOT / "bench" / "results" / "2026-11-23-simulation.json").read_text(encoding="utf-8"))

NODE_DEFAULTS = {
    "decode-running": DecodeLimitsConfig().max_running_requests,
    "prefill-running": LimitsConfig().max_running_requests,
    "chunk-tokens": ChunkConfig().chunk_tokens,
    "max-step-tokens": PrefillLimitsConfig().max_step_tokens,
    "ring-mib": ring_capacity_bytes(RingConfig(), 80 << 30, device="cuda") >> 20,
    "staging-slots": StagingConfig().num_slots,
}
SIMULATED = ("prefill-pool-tokens", "decode-pool-tokens", "layer-groups", *NODE_DEFAULTS)


@pytest.mark.parametrize("flag", SIMULATED)
def test_what_the_table_rests_on_is_named_beside_it(flag: str) -> None:
    """With the nodes' own limits the same clusters serve a tenth of it."""
    (row,) = re.findall(rf"^\|[^|]*\(`--{flag}`\) \| ([^|]*) \| ([^|]*) \|$", PAGE, re.MULTILINE)
    simulated = vars(command.parser().parse_args([]))[flag.replace("-", "_")]
    assert re.match(r"\d+", row[0]) and int(row[0].split()[0].rstrip(",:")) == simulated
    if flag in NODE_DEFAULTS:
        assert int(row[1].split()[0]) == NODE_DEFAULTS[flag]


def outcome(**wanted: object) -> dict[str, Any]:
    """Of the one run of the record with these settings; what is not given is as the command has it."""
    made = command.parser()
    base = command.settings_of(made.parse_args(["--staging-slots", "2"])).to_json() | {"placement": "order"}
    rate = wanted.pop("rate")
    seed = f"--seed {wanted.pop('seed', 0)}"
    asked = base | {key: value for key, value in wanted.items()}
    (found,) = [
        run["outcome"]
        for run in RECORD["runs"].values()
        if all(run["settings"][key] == asked[key] for key in run["settings"])
        and f"--rate {rate} " in run["command"]
        and (seed in run["command"] or ("--seed" not in run["command"] and seed == "--seed 0"))
    ]
    return dict(found)


def test_what_the_ring_costs_is_what_was_simulated() -> None:
    rows = re.findall(r"^  \| (\d+) : (\d+), (\d+)/s, `(\w+)`, (\d) \| (\d*) ?\| (\d*) ?\| (\d*) ?\|$", PAGE, re.MULTILINE)
    assert len(rows) == 6
    for prefill, decode, rate, placement, seed, *told in rows:
        for gib, told_ms in zip((8, 4, 2), told, strict=True):
            if told_ms:
                nodes = {"num_prefill": int(prefill), "num_decode": int(decode), "ring_bytes": gib << 30}
                found = outcome(rate=rate, placement=placement, seed=seed, **nodes)
                assert round(found["ttft_s"]["p50"] * 1e3) == int(told_ms), (prefill, rate, placement, seed, gib)


@pytest.mark.parametrize(("prefill", "decode", "rate"), [(46, 18, 443), (193, 63, 1780), (770, 254, 7171)])
def test_the_rows_of_many_nodes_are_what_was_simulated(prefill: int, decode: int, rate: int) -> None:
    found = outcome(num_prefill=prefill, num_decode=decode, rate=rate)
    (row,) = re.findall(rf"^\| [\d,]+ \| {prefill} : {decode} \|.*$", PAGE, re.MULTILINE)
    assert f"| {rate:,}, and more |" in row and found["attainment"] > 0.97 and found["served"] == found["requests"]
    told = " / ".join(f"{found['ttft_s'][name] * 1e3:,.0f}" for name in ("p50", "p90", "p99"))
    assert f"| {told} |" in row


@pytest.mark.parametrize(
    ("setting", "value", "good"),
    [("decode_running", 32, "7.2 %"), ("prefill_running", 32, "98.9 %"), ("layer_groups", 1, "98.8 %")],
)
def test_what_a_setting_costs_is_what_was_simulated(setting: str, value: int, good: str) -> None:
    found = outcome(num_prefill=46, num_decode=18, rate=295, **{setting: value})
    assert f"{found['attainment'] * 100:.1f} %" == good
    assert re.search(rf"^\| .* \| {re.escape(good)} \| .*\|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("name", "num_rows"), [("sixteen-cores", 15), ("two-cores", 12)])
def test_how_far_it_is_off_is_what_this_version_simulates(name: str, num_rows: int) -> None:
    """The tables are the records', and a record's predictions those of the simulation as it is now."""
    text = (ROOT / "bench" / "results" / f"2026-11-24-{name}-scaling.json").read_text(encoding="utf-8")
    record = json.loads(text)
    again = json.loads(json.dumps(predicted_again(record)))
    for then, now in zip(record["rows"], again["rows"], strict=True):
        for what in ("ttft_s.p50", "ttft_s.p90", "tpot_s.p50", "tpot_s.p90"):
            assert now[what]["predicted"] == pytest.approx(then[what]["predicted"], rel=1e-3), (
                then["prefill"],
                then["decode"],
                what,
            )
    table = PAGE[PAGE.index(f"results/2026-11-24-{name}-scaling.json)") :]
    rows = re.findall(r"^\| (\d)\+(\d) \| (\d+) % \| ([\d.]+) \| (.*) \|$", table, re.MULTILINE)[:num_rows]
    assert len(rows) == num_rows == len(record["rows"])
    for told, row in zip(rows, record["rows"], strict=True):
        assert told[:4] == (f"{row['prefill']}", f"{row['decode']}", f"{row['load'] * 100:.0f}", f"{row['offered_rate']:.1f}")
        cells = []
        for what, digits in (("ttft_s.p50", 0), ("ttft_s.p90", 0), ("tpot_s.p50", 1), ("tpot_s.p90", 1)):
            measured, predicted = (f"{row[what][which] * 1e3:,.{digits}f}" for which in ("measured", "predicted"))
            cells.append(f"{measured} -> {predicted} ({round(row[what]['error'] * 100):+d} %)")
        assert told[4].split(" | ") == cells


def test_what_the_page_says_of_the_errors_is_so() -> None:
    records = {
        name: json.loads((ROOT / "bench" / "results" / f"2026-11-24-{name}-scaling.json").read_text(encoding="utf-8"))
        for name in ("sixteen-cores", "two-cores")
    }
    many, few = records["sixteen-cores"]["rows"], records["two-cores"]["rows"]
    assert "14 of 15 medians are within 18 %, most of them too low, and so are their p90 within 25 %" in PAGE
    near = [row for row in many if abs(row["ttft_s.p50"]["error"]) < 0.18]
    assert len(near) == 14 and all(abs(row["ttft_s.p90"]["error"]) < 0.25 for row in near)
    assert sum(row["ttft_s.p50"]["error"] < 0 for row in near) > 10
    assert "too low, by a quarter on average on sixteen cores" in PAGE
    assert 0.2 < -sum(row["tpot_s.p50"]["error"] for row in many) / len(many) < 0.3
    assert "it says half of the\n  TTFT that is measured" in PAGE
    busy = [row for row in few if (row["prefill"], row["decode"]) == (2, 2) and row["load"] > 0.5]
    assert all(-0.6 < row["ttft_s.p50"]["error"] < -0.4 for row in busy)
    assert "the cores that clusters took are within 15 % of those expected, for all 27 loads" in PAGE
    for record in records.values():
        for row in record["rows"]:
            expected = row["busy"]["shared cores"] * record["stage_times"]["cores"] + row["idle_cores"]
            assert abs(expected / row["used_cores"] - 1) < 0.15
