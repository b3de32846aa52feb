"""Imported by a node's fork server before it forks ranks: what every rank would otherwise import for seconds by itself."""

from embedded_engine.engine import preload

preload()
