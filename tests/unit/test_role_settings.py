"""A node's settings in its other role: where they come from, what may differ, and how it is said that something is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transfer.config import DecodeNodeConfig, PrefillNodeConfig, settings
from transfer.errors import ConfigError
from transfer.load_config import load_config
from transfer.role_settings import KEPT, load_other_role


def decode_node(tmp_path: Path, other: str | None, **flags: object) -> DecodeNodeConfig:
    given: dict[str, object] = {"model": "/models/a", "tls.insecure": 1}
    given |= {name.replace("__", "."): value for name, value in flags.items()}
    if other is not None:
        (tmp_path / "other.yaml").write_text(other)
        given["other_role"] = tmp_path / "other.yaml"
    return load_config(DecodeNodeConfig, flags=given)


def test_without_a_file_there_is_no_other_role(tmp_path: Path) -> None:
    assert load_other_role(decode_node(tmp_path, None)) is None


def test_what_the_file_does_not_name_is_as_in_the_nodes_own_settings(tmp_path: Path) -> None:
    own = decode_node(
        tmp_path,
        "chunk: {chunk_tokens: 64}\npool: {page_size: 8}\n",
        server__port=7100, pool__num_tokens=4096, pool__page_size=32,
        parallel__tp_size=2, breaker__failures=2, peers__prefill_nodes="a:1", offload__host_ratio=8,
    )  # fmt: skip
    other = load_other_role(own)
    assert isinstance(other, PrefillNodeConfig)
    assert not other.offload.is_on, "host memory serves each role differently"
    assert (other.chunk.chunk_tokens, other.pool.page_size, other.pool.num_pages) == (64, 8, 512)
    assert (other.server.port, other.parallel.tp_size, other.model) == (7100, 2, Path("/models/a"))
    assert (
        other.other_role is None
        and other.limits.max_step_tokens
        == PrefillNodeConfig.model_validate({"model": "/m", "tls": {"insecure": 1}}).limits.max_step_tokens
    )


def test_each_role_has_the_other_one(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("peers: {prefill_nodes: ['a:1']}\noffload: {host_ratio: 1}\n")
    given: dict[str, Any] = {"model": "/m", "tls.insecure": 1, "other_role": tmp_path / "other.yaml", "chunk.chunk_tokens": 32}
    other = load_other_role(load_config(PrefillNodeConfig, flags=given))
    assert isinstance(other, DecodeNodeConfig) and other.peers.prefill_nodes == ("a:1",) and other.offload.is_on


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model: /models/b\n", "model is /models/b, and /models/a in the settings of the decode node; a change of role leaves"),
        ("server: {port: 9}\n", "server.port is 9, and 7100 in the settings of the decode node"),
        (
            "ring: {capacity_bytes: 5}\n",
            "ring.capacity_bytes is no setting (from {file}) of prefill-node; it is one of decode-node",
        ),
        ("chunk: {chunk_tokens: 0}\n", "chunk.chunk_tokens is 0 (from {file}); it must be at least 1"),
    ],
)
def test_what_is_wrong_names_file_setting_and_both_values(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "other.yaml"
    with pytest.raises(ConfigError) as caught:
        load_other_role(decode_node(tmp_path, content))
    assert str(caught.value).startswith(f"other_role is {file}: {said.replace('{file}', str(file))}")


def test_what_is_kept_are_settings_of_both_roles() -> None:
    known = {path for path, _ in settings(PrefillNodeConfig)} & {path for path, _ in settings(DecodeNodeConfig)}
    assert all(any(path == name or path.startswith(f"{name}.") for path in known) for name in KEPT)
