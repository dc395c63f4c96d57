"""data.documents=apart: a document sees itself alone (tests/model has what a model makes of the numbers)."""

import torch

from mingpt.data.windows import apart

END = 9


def test_a_document_begins_after_the_end_of_the_one_before() -> None:
    text = torch.tensor([[1, 2, END, 4, 5, END, END, 6, 7]])
    assert apart((text[:, :-1], text[:, 1:]), END)[3].tolist() == [[0, 0, 1, 1, 1, 2, 3, 3]]
