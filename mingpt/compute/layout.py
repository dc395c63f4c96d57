"""The tensors that an update has in a snapshot, and how a snapshot's differ from them."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

Layout = tuple[torch.Size, torch.dtype]
MARK = ".own."  # of an own optimizer's state: `<parameter>.own.<name>`, so that AdamW's is not taken for it


def state_layout(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    fp16: bool,
    of_muon: Container[str],
    own: Callable[[torch.Size], Mapping[str, torch.Size]] | None,
    ema: bool,
) -> dict[str, Layout]:
    """Names, shapes and dtypes of `Update.state()` after a step.

    of_muon: the parameters that Muon updates. own: what the user's own optimizer remembers of a tensor, by name.
    ema: whether there is a mean of the weights.
    """
    scalar = torch.Size(), torch.float32
    out: dict[str, Layout] = {"loss_scale": scalar, "loss_scale.finite_steps": scalar} if fp16 else {}
    for name, p in named_parameters:
        if ema:
            out[f"{name}.ema"] = p.shape, p.dtype
        if own:
            for key, shape in own(p.shape).items():
                out[f"{name}{MARK}{key}"] = shape, p.dtype
        elif name in of_muon:
            out[f"{name}.momentum_buffer"] = p.shape, p.dtype
        else:
            # A count for each parameter, although most are equal: one that a resume thaws begins at 0, and with it the
            # correction of its moments.
            out[f"{name}.step"] = scalar
            out[f"{name}.exp_avg"] = p.shape, p.dtype
            out[f"{name}.exp_avg_sq"] = p.shape, p.dtype
    return out


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, Layout]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def misfits(expected: Mapping[str, Layout], found: Mapping[str, Layout]) -> list[str]:
    """One line for each tensor whose name, shape or dtype is not as expected."""

    def text(shape: Sequence[int], dtype: torch.dtype) -> str:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

    problems = [f"{name} is missing" for name in sorted(expected.keys() - found)]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - expected)]
    for name in sorted(expected.keys() & found):
        if found[name] != expected[name]:
            problems.append(f"{name} is {text(*found[name])} in place of {text(*expected[name])}")
    return problems
