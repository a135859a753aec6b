"""`kinject find-lr` and `kinject find-batch`: a learning rate and a batch size from short runs."""
