"""The decode daemon: receives the KV of prompts and generates from it."""
