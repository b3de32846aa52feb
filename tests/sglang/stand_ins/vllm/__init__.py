"""SGLang's rotary embedding asks vLLM for an operator where it has no GPU."""
