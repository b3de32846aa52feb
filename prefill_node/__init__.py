"""The prefill daemon: computes the KV of prompts and sends it to decode nodes."""
