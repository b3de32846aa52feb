"""How long each stage takes: measured, and read from a file. The simulation knows no other times."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

_MAY_BE_ZERO = {"cores", "other_request_s", "other_token_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Of one kind of node and link. Seconds; a stage of n things takes its fixed part and n times the other.

    A prefill step of chunks takes `prefill_step_s` + `prefill_token_s` for each token + `prefill_attention_s` for each pair of a
    token and one before it. A decode step takes `decode_step_s` + `decode_request_s` for each request + `decode_context_s` for
    each token of all their contexts.

    Args:
        name: What was measured, for people.
        sources: Where the numbers come from: records, or what was assumed.
        bytes_per_token: KV that a prefill rank sends for a token.
        gather_s, gather_bytes_per_s: Pages to staging; 0 bytes a second: the gather is the write.
        link_latency_s, link_bytes_per_s: A write.
        scatter_s, scatter_bytes_per_s: Ring to pages, digest included.
        hand_s: What a rank's loop needs for a piece, one piece after another, on either side.
        grant_s: From asking for grants to having them.
        ack_s: From a release until the writer knows of it.
        reserve_s: From asking for room to having it.
        request_s: From the client to the prefill node's queue, and back with the first token.
        cores: Cores that all nodes share, where everything is work; 0: each node has its own, and ways between nodes take time
            without work.
        other_request_s, other_token_s: With shared cores: work beside the stages, for a request, and for each token that
            is streamed.
    """

    name: str
    sources: tuple[str, ...] = ()
    bytes_per_token: int
    prefill_step_s: float
    prefill_token_s: float
    prefill_attention_s: float
    decode_step_s: float
    decode_request_s: float
    decode_context_s: float
    gather_s: float
    gather_bytes_per_s: float
    link_latency_s: float
    link_bytes_per_s: float
    scatter_s: float
    scatter_bytes_per_s: float
    hand_s: float
    grant_s: float
    ack_s: float
    reserve_s: float
    request_s: float
    cores: float = 0.0
    other_request_s: float = 0.0
    other_token_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str | tuple):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name} is {value!r}; it must be a finite number, not negative")
        for name in ("bytes_per_token", "link_bytes_per_s", "scatter_bytes_per_s", "prefill_token_s", "decode_step_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @classmethod
    def read(cls, file: Path) -> StageTimes:
        """Of a YAML or JSON file; in a record of `bench.scaling` they stand under ``stage_times``.

        Raises:
            ValueError: It cannot be read, misses a stage, or has one that is none.
        """
        try:
            text = file.read_text(encoding="utf-8")
            content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{file}: {error}") from None
        if isinstance(content, Mapping) and "stage_times" in content:
            content = content["stage_times"]
        return cls.of(content, where=str(file))

    @classmethod
    def of(cls, content: Any, *, where: str) -> StageTimes:
        """Of a mapping. Raises ValueError as `read` does."""
        if not isinstance(content, Mapping):
            raise ValueError(f"{where} is no mapping of stages to seconds")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(content) - known):
            raise ValueError(f"{where} has {unknown[0]!r}, which is no stage; there are {', '.join(sorted(known))}")
        given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"sources": list(self.sources)}

    def prefill_seconds(self, parts: list[tuple[int, int]]) -> float:
        """Of a step over (new tokens, tokens before them) of several requests."""
        seconds = self.prefill_step_s
        for new, before in parts:
            seconds += self.prefill_token_s * new + self.prefill_attention_s * new * (before + new / 2)
        return seconds

    def prompt_seconds(self, num_tokens: int, chunk_tokens: int) -> float:
        """Of the steps of one prompt alone."""
        begins = range(0, num_tokens, chunk_tokens)
        return sum(self.prefill_seconds([(min(chunk_tokens, num_tokens - begin), begin)]) for begin in begins)

    def decode_seconds(self, num_requests: int, num_context_tokens: float) -> float:
        """Of a step."""
        return self.decode_step_s + self.decode_request_s * num_requests + self.decode_context_s * num_context_tokens

    def gather_seconds(self, num_bytes: int) -> float:
        return self.gather_s + (num_bytes / self.gather_bytes_per_s if self.gather_bytes_per_s else 0.0)

    def scatter_seconds(self, num_bytes: int) -> float:
        return self.scatter_s + num_bytes / self.scatter_bytes_per_s
