"""A node's settings: its YAML file, the environment, and the flags."""

from __future__ import annotations

import json
import random
from typing import Any

import yaml

from fuzz.target import Target, require, scratch_folder
from fuzz.trees import BORDERS, BYTE_SHARE, FLOATS, TEXTS, changed_bytes, changed_tree
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig, settings
from transfer.errors import ConfigError
from transfer.load_config import load_config

_FILE = scratch_folder() / "settings.yaml"
_ROLES: tuple[type[NodeConfig], ...] = (PrefillNodeConfig, DecodeNodeConfig)
_PATHS = tuple(sorted({path for role in _ROLES for path, _ in settings(role)}))


def check(data: bytes) -> None:
    """A line of JSON with role, environment and overrides, and the YAML file behind it."""
    head, _, text = data.partition(b"\n")
    try:
        role, environment, overrides = json.loads(head)
        environment = {str(name): str(value) for name, value in environment.items()}
        overrides = [str(one) for one in overrides]
        config_type = _ROLES[bool(role)]
    except (ValueError, TypeError, AttributeError, RecursionError):
        config_type, environment, overrides = PrefillNodeConfig, {}, []
    _FILE.write_bytes(text)
    config = load_config(config_type, file=_FILE, environment=environment, overrides=overrides)
    require(isinstance(config, config_type), "settings of another role")
    require(config_type.model_validate(config.model_dump()) == config, "settings that are refused when they are read again")


def _parsed(data: bytes) -> list[Any]:
    head, _, text = data.partition(b"\n")
    return [json.loads(head), yaml.safe_load(text)]


def _packed(tree: list[Any]) -> bytes:
    return json.dumps(tree[0]).encode() + b"\n" + yaml.safe_dump(tree[1]).encode()


def mutate(data: bytes, rng: random.Random) -> bytes:
    if rng.random() >= BYTE_SHARE:
        try:
            tree = _parsed(data)
            if rng.random() < 0.5:
                _set_something(tree, rng)
            else:
                tree = changed_tree(tree, rng)
            return _packed(tree)
        except Exception:  # no JSON, no YAML, or nothing that either can say
            pass
    return changed_bytes(data, rng)


def _set_something(tree: list[Any], rng: random.Random) -> None:
    """A setting that there is, to any value, by any of the ways."""
    path = rng.choice(_PATHS)
    value: Any = rng.choice((*BORDERS, *FLOATS, *TEXTS, None, True, [], {}))
    way = rng.randrange(3)
    if way == 0:
        tree[0][2].append(f"{path}={value}")
    elif way == 1:
        tree[0][1]["KVFERRY_" + path.upper().replace(".", "__")] = str(value)
    else:
        *parents, name = path.split(".")
        section = tree[1]
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value


def _seed(role: int, tree: dict[str, Any], environment: dict[str, str], *overrides: str) -> bytes:
    return _packed([[role, environment, list(overrides)], tree])


TARGET = Target(
    name="settings",
    about="settings (YAML, environment, flags)",
    modules=("transfer.load_config", "transfer.config"),
    check=check,
    refuses=(ConfigError,),
    mutate=mutate,
    seeds=lambda: [
        _seed(
            0,
            {"model": "/models/x", "chunk": {"chunk_tokens": 128}, "limits": {"max_queued_requests": 5}},
            {},
            "pool.page_size=32",
        ),
        _seed(1, {"model": "/models/x", "peers": {"prefill_nodes": ["a:1", "b:2"]}}, {"KVFERRY_RING__CAPACITY_BYTES": "1048576"}),
    ],
    max_bytes=1024,
    max_line_chars=20_000,
    is_one_line=False,
)
