"""`model.init_from`: start a run with the weights of a model in Hugging Face's form, instead of random ones."""

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from mingpt.config.checks import no_weights
from mingpt.data.source import Vocabulary
from mingpt.errors import UserError
from mingpt.files.folder import ModelFolder
from mingpt.model.language import LanguageModel
from mingpt.weights.fitting import Form, config_problems, form_of, tensor_problems, vocabulary_problems
from mingpt.world.world import World

KEY = "model.init_from"
CONFIG, WEIGHTS, INDEX, PICKLE = "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
JSON_LIMIT, WEIGHTS_LIMIT = 64 * 2**20, 2**40  # bytes
TOKENIZER = "tokenizer.json"
CURES = (
    "set model=gpt2 for GPT-2's, model=modern for Qwen3's, model=modern model.qk_norm=false for Llama's, and "
    "model.qkv_bias=true, too, for Qwen2's"
)


class WeightsFolder(ModelFolder):
    """Methods raise UserError, which names key and file."""

    def __init__(self, url: str) -> None:
        super().__init__(url, KEY, [CONFIG, "*.safetensors", INDEX, TOKENIZER])
        self.hashes: dict[str, str] = {}  # sha256 by name, of the files that were read

    def error(self, *problems: str) -> UserError:
        return UserError(*(f"{self.shown}: {problem}" for problem in problems))

    def content(self, name: str, limit: int = WEIGHTS_LIMIT) -> bytes | None:
        """A file's content; None if it does not exist. limit: the largest size, in bytes."""
        content = self.read(name, limit)
        if content is not None:
            self.hashes[name] = sha256(content).hexdigest()
        return content

    def json(self, name: str) -> dict[str, Any] | None:
        content = self.content(name, JSON_LIMIT)
        if content is None:
            return None
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self.error(f"{name} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise self.error(f"{name} is not a JSON object")
        return fields

    def text(self, name: str) -> str | None:
        content = self.content(name, JSON_LIMIT)
        return None if content is None else content.decode("utf-8-sig", "replace")


@dataclass(frozen=True)
class Weights:
    """Weights as the model takes them."""

    # By our model's names.
    tensors: dict[str, Tensor]
    # Over the files that they come from. It is in the fingerprint: other weights are another run.
    sha256: str


def start_from(model: LanguageModel, url: str, vocabulary: Vocabulary, world: World) -> str:
    """Load the weights at a URL into the model; returns the sha256 of their files.

    Called by all processes. Rank 0 reads and broadcasts, so the other nodes need not have the folder. Raises UserError
    in all processes if the weights don't fit the model or the vocabulary.
    """
    read: list[Weights] = []

    def read_on_main() -> str:
        read.append(read_weights(url, form_of(model), vocabulary))
        return read[0].sha256

    identity: str = world.run_on_main(read_on_main)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            mine = parameter.cpu().contiguous() if not read else _padded(read[0].tensors[name], parameter)
            raw = mine.flatten().view(torch.uint8).numpy().data
            received = world.broadcast_bytes(raw if read else None, 0, len(raw))
            parameter.copy_(torch.frombuffer(received, dtype=mine.dtype).view(mine.shape))
    return identity


def _padded(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The tensor in float32, in the parameter's shape.

    Rows that only the parameter has (padding, which no token uses) keep its values. Rows that only the tensor has
    (positions after model.block_size) are left out.
    """
    whole = parameter.detach().to("cpu", torch.float32, copy=True).contiguous()
    rows = min(len(whole), len(tensor))
    whole[:rows] = tensor[:rows]
    return whole


def read_weights(url: str, form: Form, vocabulary: Vocabulary) -> Weights:
    """Read the folder and compare it with the model and the vocabulary. Raises UserError with all that does not fit."""
    folder = WeightsFolder(url)
    config = folder.json(CONFIG)
    if config is None:
        raise UserError(no_weights(url))
    if (kind := config.get("model_type")) != form.model_type:
        raise folder.error(
            f"weights of another architecture ({CONFIG}: model_type={kind!r}): take those of a {form.name}, or {CURES}"
        )
    if problems := config_problems(config, form):
        raise folder.error(*problems)
    tensors = form.renamed(_read_tensors(folder, form))
    identity = sha256("".join(f"{name} {h}\n" for name, h in sorted(folder.hashes.items())).encode()).hexdigest()
    tokenizer = folder.text(TOKENIZER)
    if problems := [*tensor_problems(tensors, config, form), *vocabulary_problems(tokenizer, vocabulary)]:
        raise folder.error(*problems)
    return Weights(tensors, identity)


def _read_tensors(folder: WeightsFolder, form: Form) -> dict[str, Tensor]:
    """Read model.safetensors, or else the files that model.safetensors.index.json names."""
    if (content := folder.content(WEIGHTS)) is not None:
        return _decoded(folder, WEIGHTS, content)
    index = folder.json(INDEX)
    if index is None:
        if folder.fs.exists(folder.path(PICKLE)):
            raise folder.error(
                f"there is no {WEIGHTS}, and {PICKLE} is never read, since a pickle can run any code: convert it with "
                f"transformers: {form.convert}.from_pretrained(folder).save_pretrained(folder)"
            )
        raise folder.error(f"there is no {WEIGHTS} and no {INDEX} (other forms are not read): check the spelling")
    names = index.get("weight_map")
    files = sorted(set(names.values())) if isinstance(names, dict) and all(map(_is_name, names.values())) else []
    if not files:
        raise folder.error(f"{INDEX} has no weight_map from tensors to files of this folder: copy it again")
    tensors: dict[str, Tensor] = {}
    for name in files:
        if (content := folder.content(name)) is None:
            raise folder.error(f"{INDEX} names {name}, which is missing: copy the whole folder")
        tensors |= _decoded(folder, name, content)
    return tensors


def _is_name(value: object) -> bool:
    """Tell whether a value names a file in the folder itself, not in another one or on another server."""
    return (
        isinstance(value, str)
        and value.isprintable()
        and bool(value.strip("."))
        and not {"/", "\\", ":"}.intersection(value)
    )


def _decoded(folder: WeightsFolder, name: str, content: bytes) -> dict[str, Tensor]:
    try:
        return load_safetensors(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise folder.error(f"{name} is damaged, or not a safetensors file ({error}): copy it again") from error
