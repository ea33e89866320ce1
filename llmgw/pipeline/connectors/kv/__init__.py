"""KV connectors, one file each; found by `llmgw.pipeline.step.KV_CONNECTORS`."""
