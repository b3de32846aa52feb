"""An empty text is no prompt, also where the tokenizer would make a token of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, models, processors

from decode_node.node import DecodeNode
from node_runtime.daemon import Daemon, NodeState
from tests.runtime.instances import decode_config
from transfer.errors import ConfigError
from transfer.pb import kvferry_pb2 as pb


async def test_an_empty_text_is_refused_where_the_tokenizer_begins_every_text_with_a_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "word": 1}, unk_token="<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    node = DecodeNode(cast(Daemon, SimpleNamespace(state=NodeState.READY, other_config=None)), decode_config(tmp_path))
    life: Any = SimpleNamespace(max_context_tokens=64, vocab_size=2)
    assert await node.text.encode("", max_tokens=64) == (0,)
    with pytest.raises(ConfigError, match=r"^prompt is empty; it must have at least one character$"):
        await node._submit(life, pb.GenerateRequest(prompt="", max_new_tokens=4))
