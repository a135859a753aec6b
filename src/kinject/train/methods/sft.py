"""`method: sft`: supervised fine-tuning on conversations, or prompts with their completions."""

from __future__ import annotations

from kinject.train.methods.base import Method


class SupervisedFineTuning(Method):
    """Learns the answers of rows that have questions."""

    name = "sft"
    refused_shapes = ("text",)
