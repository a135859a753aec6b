"""Tasks of lm-evaluation-harness: YAML files, the rows of their splits, and their templates."""
