"""The steps that come with llmgw, one file each; found by `llmgw.pipeline.step.STEPS`."""
