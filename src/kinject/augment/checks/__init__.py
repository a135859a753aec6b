"""Checks of an answer before it may enter the corpus: what it adds, which facts it carries, and
what a judge says."""
