"""A model of one's own: any `nn.Module` that takes tokens and returns logits.

    islands run --model examples.my_model:build --set model.width=64

Settings under `model:` become keyword arguments of `build`. A model with a `loss(tokens)` method is
asked for its own loss instead.
"""

from torch import Tensor, nn


class Recurrent(nn.Module):
    """A GRU over bytes."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, window) int64 to logits (batch, window, vocab_size)."""
        hidden, _ = self.rnn(self.embed(tokens))
        logits: Tensor = self.head(hidden)
        return logits


def build(width: int = 32, vocab_size: int = 256) -> nn.Module:
    """What `--model examples.my_model:build` calls."""
    return Recurrent(width, vocab_size)
