"""Adapters that other engines load: kvferry inside the processes of vLLM and SGLang, see docs/engines.md."""
