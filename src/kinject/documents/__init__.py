"""Readers of files: each yields the documents that a file holds, with their places."""
