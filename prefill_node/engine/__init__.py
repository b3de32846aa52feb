"""What a prefill node asks of its engine."""

from prefill_node.engine.base import OnLayersWritten, PrefillEngine

__all__ = ["OnLayersWritten", "PrefillEngine"]
