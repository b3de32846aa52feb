"""What a decode node asks of its engine."""

from decode_node.engine.base import DecodeEngine

__all__ = ["DecodeEngine"]
