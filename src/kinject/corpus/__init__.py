"""Documents, passages, question files, corpus rows, tokens, packing and mixing. Imports neither
torch nor transformers."""
