"""The targets, each a module with its `TARGET`."""
