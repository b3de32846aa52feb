"""`kvferry route`: an OpenAI-compatible front for prefill and decode servers."""
