"""EC connectors, one file each; found by `llmgw.pipeline.step.EC_CONNECTORS`."""
