"""llmgw: an LLM gateway and control plane in one program. See README.md for use, docs/ for operation."""

__version__ = "0.1.0"
