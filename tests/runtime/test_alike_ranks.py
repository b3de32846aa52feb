"""Ranks of one group must be alike: a node begins no life with ranks that differ, in either role."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from node_runtime.daemon import NodeState
from node_runtime.supervisor import RankSupervisor, check_alike
from tests.runtime.daemons import node_of
from tests.runtime.instances import hello
from transfer.errors import EngineError
from transfer.layout import DType, Shard

ALIKE = hello(0), hello(1)
UNLIKE = hello(0), hello(1, pool_pages=9)
REFUSAL = "ranks 0 and 1 have 8 and 9 pages"


def test_differences_are_named() -> None:
    check_alike(ALIKE)
    with pytest.raises(EngineError, match="ranks 0 and 1 have loaded different models"):
        check_alike((hello(0), hello(1, weights="other")))
    with pytest.raises(EngineError, match=REFUSAL):
        check_alike(UNLIKE)
    fp8 = replace(hello(0).instance, shard=Shard(dtype=DType.FLOAT8_E4M3))
    for changes, name in (({"kv_scales": ((0.5, 0.5),) * fp8.layout.num_layers}, "kv_scales"), ({"digests": ("b",)}, "digests")):
        other = replace(hello(1), instance=replace(fp8, **changes))
        with pytest.raises(EngineError, match=f"ranks 0 and 1 have different {name}"):
            check_alike((replace(hello(0), instance=fp8), other))


async def test_a_node_does_not_start_with_ranks_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankSupervisor, "start", AsyncMock(return_value=UNLIKE))
    async with node_of(tmp_path) as node:
        with pytest.raises(EngineError, match=REFUSAL):
            await node.until_ready()
        assert "begin" not in node.role.history


async def test_a_node_keeps_its_role_if_ranks_differ_in_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankSupervisor, "start", AsyncMock(return_value=ALIKE))
    monkeypatch.setattr(RankSupervisor, "switch", AsyncMock(side_effect=[UNLIKE, ALIKE]))
    async with node_of(tmp_path, has_two_roles=True) as node:
        await node.until_ready()
        with pytest.raises(EngineError, match=REFUSAL):
            await node.daemon.switch_role()
        assert (node.daemon.config.role, node.daemon.state) == ("prefill", NodeState.READY)
        assert "begin" not in node.decode.history
