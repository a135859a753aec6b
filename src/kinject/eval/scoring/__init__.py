"""Log-probabilities of continuations under a model: prompts to tokens, a token tree, forward
passes, stored answers."""
