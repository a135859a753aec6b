"""`kinject plan`: the memory and time that a training run will need."""
