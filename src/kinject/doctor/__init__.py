"""`kinject doctor`: what this machine has, and which recipes run on it."""
