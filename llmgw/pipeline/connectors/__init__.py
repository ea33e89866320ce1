"""The connectors that come with llmgw: `kv` (KV cache, prefill to decode) and `ec` (encoder outputs, encode to prefill)."""
