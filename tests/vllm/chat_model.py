"""The tests' model: the demo's Llama with random weights, its byte-level tokenizer, and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from kvferry.demo.model import make_demo_model

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_chat_model(directory: Path) -> Path:
    """Make it in a new or empty directory; the same bytes every time, in some seconds. TP 1, 2, 3, 4, 6 and 12 divide it."""
    make_demo_model(directory)
    settings = directory / "tokenizer_config.json"
    config = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps(config | {"chat_template": CHAT_TEMPLATE}, indent=2), encoding="utf-8")
    return directory
