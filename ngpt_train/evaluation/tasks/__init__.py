"""Tasks of lm-evaluation-harness on a model as it is, without an export."""
