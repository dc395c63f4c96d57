"""data.documents=apart: the loss of a sample is that of its documents one by one."""

import pytest
import torch
from torch import Tensor

from mingpt.data.windows import apart
from mingpt.model.gpt2 import GPT, GPTConfig

END = 9


def row(*tokens: int) -> Tensor:
    return torch.tensor([tokens])


def test_a_samples_loss_is_that_of_its_documents_alone() -> None:
    torch.manual_seed(3)
    model = GPT(GPTConfig(10, 12, 2, 2, 16))
    with torch.no_grad():
        for parameter in model.parameters():  # a new model's are too small for the place of a token to matter
            parameter.add_(torch.randn_like(parameter) * 0.3)
    text = row(1, 2, END, 4, 5, END, END, 6, 7)
    batch = apart((text[:, :-1], text[:, 1:]), END)
    assert batch[3].tolist() == [[0, 0, 1, 1, 1, 2, 3, 3]]
    loss, count = model(*batch)
    parts = row(1, 2, END), row(END, 4, 5, END), row(END, END), row(END, 6, 7)
    alone = [model(part[:, :-1], part[:, 1:]) for part in parts]
    assert count == sum(c for _, c in alone) == 8
    assert loss.item() == pytest.approx(sum(part.item() for part, _ in alone), rel=1e-5)
    joined, _ = model(text[:, :-1], text[:, 1:])
    assert joined.item() != pytest.approx(loss.item(), rel=1e-3)
