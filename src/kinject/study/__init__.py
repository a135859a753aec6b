"""Whole experiments: arms, seeds and claims, from one recipe to a result."""
