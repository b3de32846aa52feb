"""The control plane: per-grant messages between ranks. `base` is the interface; one implementation per file."""
