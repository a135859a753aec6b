"""Intervals, tests and comparisons of accuracies, for evaluations and studies. Arrays in, numbers
out: no files."""
