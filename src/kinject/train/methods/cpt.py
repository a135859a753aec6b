"""`method: cpt`: continued pretraining on plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinject.train.methods.base import Method

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHAT_WARNING = (
    "plain text is trained into a model whose tokenizer has a chat template: it forgets to chat as "
    "it learns. docs/chat.md has what keeps it"
)


class ContinuedPretraining(Method):
    """Learns each token of texts."""

    name = "cpt"
    refused_shapes = ("messages", "completion")

    def warnings_on_rows(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return a warning if the model can chat, which it forgets."""
        if tokenizer.chat_template:
            return [_CHAT_WARNING]
        return []
