"""data.documents=apart: the loss of a sample is that of its documents one by one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mingpt.data.documents import apart
from mingpt.data.shards import ShardsData, open_shards
from mingpt.errors import UserError
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import LanguageModel
from mingpt.model.modern import Modern, ModernModel

END = 9


def vivid(model: LanguageModel) -> LanguageModel:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


MODELS = {
    "gpt2": lambda: vivid(GPT(GPTConfig(10, 12, 2, 2, 16))),
    "modern": lambda: vivid(Modern(ModernModel.model_validate({"n_head": 2, "n_embd": 16}).shape(10))),
}


def row(*tokens: int) -> Tensor:
    return torch.tensor([tokens])


@pytest.mark.parametrize("name", MODELS)
def test_a_samples_loss_is_that_of_its_documents_alone(name: str) -> None:
    model = MODELS[name]()
    text = row(1, 2, 3, END, 4, 5, END, END, 6, 7, 8, 1, 2)
    batch = apart((text[:, :-1], text[:, 1:]), END)
    assert batch[3].tolist() == [[0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 3]]
    loss, count = model(*batch)
    alone = [model(part[:, :-1], part[:, 1:]) for part in (
        row(1, 2, 3, END), row(END, 4, 5, END), row(END, END), row(END, 6, 7, 8, 1, 2)
    )]  # fmt: skip
    assert count == sum(c for _, c in alone) == 12
    assert loss.item() == pytest.approx(sum(part.item() for part, _ in alone), rel=1e-5)
    joined, _ = model(text[:, :-1], text[:, 1:])
    assert joined.item() != pytest.approx(loss.item(), rel=1e-3)


def test_a_vocabulary_without_an_end_is_refused(tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin"):
        torch.arange(20, dtype=torch.int16).numpy().tofile(tmp_path / name)
    config = ShardsData.model_validate(
        {"path": str(tmp_path), "cache_dir": str(tmp_path / "cache"), "documents": "apart"}
    )
    with pytest.raises(UserError, match=rf"^data\.path={tmp_path}: data\.documents=apart"):
        open_shards(config, 4, 2)
