"""Conversations, for fine-tuning."""

from typing import TYPE_CHECKING, Literal

from mingpt.config.kinds import register
from mingpt.data.kinds.text import Tokenized

if TYPE_CHECKING:
    from mingpt.data.source import Source
    from mingpt.data.vocabulary import Vocabulary


@register
class ChatData(Tokenized):
    kind: Literal["chat"] = "chat"
    """conversations, with loss on the answers alone"""

    def open(self, block_size: int, micro_size: int, vocabulary: "Vocabulary | None" = None) -> "Source":
        from mingpt.data.chat import open_chat

        return open_chat(self, block_size, micro_size, vocabulary)
