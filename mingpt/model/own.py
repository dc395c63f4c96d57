"""Code of the user's own: what `model._target_` and `data._target_` name.

They are read from the command line alone. A snapshot's config names them too, and no reader of a snapshot comes here.
"""

import importlib
import inspect
import json
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from mingpt.config.schema import Own, OwnModel
from mingpt.errors import Mistake
from mingpt.redact import without_secrets
from mingpt.snapshot.format import DTYPES
from mingpt.world.distributed import World

# What code of a section is given besides its keys, if it has a parameter of this name.
SUPPLIED = {"model": ("vocab_size", "block_size"), "data": ("block_size", "micro_size")}
CURE = "take a layer without running statistics (LayerNorm, GroupNorm in place of BatchNorm)"
# What the optimizer remembers besides its moments: one snapshot has one tensor of a name.
RESERVED = {"loss_scale", "loss_scale.finite_steps"}
BOUND = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def problem(section: str, settings: Own) -> str | None:
    """What is wrong with a section's `_target_` and its arguments, before any of it is called; None: nothing."""
    try:
        target = find(section, settings.target)
        _check_arguments(section, settings, target)
    except Mistake as mistake:
        return str(mistake)
    return None


def find(section: str, path: str) -> Callable[..., Any]:
    """The class or function of a dotted path. Raises Mistake."""
    shown = f"{section}._target_={without_secrets(path)}"
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise Mistake(f"{shown}: name a class or function: package.module.Name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise Mistake(
                f"{shown}: there is no module {error.name!r}: check the spelling, and start in the folder that it lies "
                f"in, or put that on PYTHONPATH"
            ) from error
        raise Mistake(f"{shown}: importing {module_name} failed: {_told(error, None)}") from error
    except (Exception, SystemExit) as error:
        raise Mistake(f"{shown}: importing {module_name} failed: {_told(error, None)}") from error
    target = getattr(module, name, None)
    if target is None:
        close = get_close_matches(name, dir(module), n=1)
        hint = f" (did you mean {module_name}.{close[0]}?)" if close else ""
        raise Mistake(f"{shown}: the module {module_name} has no {name}{hint}")
    if not callable(target):
        raise Mistake(f"{shown} is a {type(target).__name__}, neither a class nor a function")
    if section == "model" and isinstance(target, type):
        if not issubclass(target, nn.Module):
            raise Mistake(f"{shown} is no torch.nn.Module: derive the class from it")
        if target.forward is nn.Module.forward:
            raise Mistake(f"{shown} has no forward: give it forward(tokens, targets) -> (loss_sum, count)")
    return target


def _check_arguments(section: str, settings: Own, target: Callable[..., Any]) -> None:
    """Raise Mistake unless the section's keys are arguments that the target takes."""
    shown = f"{section}._target_={settings.target}"
    given = settings.arguments
    for key, value in given.items():
        try:
            json.dumps(value, allow_nan=False)  # what manifests are written in
        except (TypeError, ValueError) as error:
            given_value = without_secrets({key: value})[key]
            raise Mistake(f"{section}.{key}={given_value!r}: must be a plain, finite value") from error
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # written in C: it will say so itself
        return
    supplied = SUPPLIED[section]
    named = {name: p for name, p in parameters.items() if p.kind not in (*BOUND, inspect.Parameter.VAR_KEYWORD)}
    problems = [
        f"{section}.{name} is missing"
        for name, p in named.items()
        if p.default is p.empty and name not in given and name not in supplied
    ]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in sorted(given.keys() - named.keys()):
            close = get_close_matches(name, named, n=1)
            hint = f" (did you mean {section}.{close[0]}?)" if close else ""
            problems.append(f"{section}.{name} is no argument of it{hint}")
    if problems:
        raise Mistake(f"{shown} takes ({', '.join(named)}): {'; '.join(problems)}")


def call(section: str, settings: Own, **supplied: Any) -> Any:
    """What the target gives for its arguments. Raises Mistake if it fails."""
    target = find(section, settings.target)
    try:
        wanted = inspect.signature(target).parameters.keys()
    except (TypeError, ValueError):
        wanted = {}.keys()
    arguments = {name: value for name, value in supplied.items() if name in wanted} | settings.arguments
    try:
        return target(**arguments)
    except Mistake:
        raise
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        shown = ", ".join(f"{k}={v!r}" for k, v in without_secrets(arguments).items())
        raise Mistake(f"{section}._target_={settings.target} failed with ({shown}): {_told(error, target)}") from error


def source_sha256(settings: Own) -> str | None:
    """Of the file that the target is written in: other code computes other bits."""
    try:
        file = inspect.getsourcefile(find("model", settings.target))
        return sha256(Path(file).read_bytes()).hexdigest() if file else None
    except (TypeError, OSError):
        return None


def _told(error: BaseException, target: object) -> str:
    """An error in a line, with the place in the user's file, or else the innermost one."""
    lines = str(error).strip().splitlines() or [""]
    frames = traceback.extract_tb(error.__traceback__)
    try:
        file = inspect.getsourcefile(target) if target is not None else None  # type: ignore[arg-type]
    except TypeError:
        file = None
    frame = next((f for f in reversed(frames) if f.filename == file), frames[-1] if frames else None)
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}, line {error.lineno})"
        lines = [error.msg]
    else:
        place = f" ({frame.filename}, line {frame.lineno})" if frame else ""
    return f"{type(error).__name__}: {without_secrets(lines[0])}{place}"


def module(settings: OwnModel, vocab_size: int) -> nn.Module:
    """The module of one's own. Raises Mistake if it is none, or holds what no snapshot can."""
    shown = f"model._target_={settings.target}"
    made = call("model", settings, vocab_size=vocab_size, block_size=settings.block_size)
    if not isinstance(made, nn.Module):
        raise Mistake(f"{shown} gives a {type(made).__name__}, and no torch.nn.Module")
    if lazy := [n for n, p in made.named_parameters() if isinstance(p, UninitializedParameter)]:
        raise Mistake(f"{shown}: {', '.join(lazy)} have no shape before the first forward: give the layers their sizes")
    state = made.state_dict()
    if others := [n for n, v in state.items() if not isinstance(v, Tensor) or v.dtype not in DTYPES]:
        raise Mistake(f"{shown}: snapshots hold plain tensors, and its state_dict has others: {', '.join(others)}")
    if taken := sorted(state.keys() & RESERVED):
        raise Mistake(f"{shown}: snapshots have tensors of their own named {', '.join(taken)}: take other names")
    if views := [n for n, p in made.named_parameters() if torch.empty_like(p).stride() != p.stride()]:
        raise Mistake(
            f"{shown}: {', '.join(views)} are views into other memory (expanded, or with gaps), which can't be "
            f"trained: give them their own, as nn.Parameter(x.clone())"
        )
    if not any(p.requires_grad for p in made.parameters()):
        raise Mistake(f"{shown} has no parameter to train")
    return made


def try_out(model: nn.Module, settings: OwnModel, microbatch: Sequence[Tensor]) -> None:
    """One forward and backward, to see that the protocol is kept. Raises Mistake; leaves the model as it was."""
    shown = f"model._target_={settings.target}"
    takes = f"forward({', '.join(f'{list(x.shape)} {str(x.dtype)[6:]}' for x in microbatch)})"
    buffers = copy_buffers(model)
    model.train()
    try:
        answer = model(*microbatch)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise Mistake(f"{shown}: {takes} failed: {_told(error, type(model))}") from error
    parts = answer if isinstance(answer, tuple) else (answer,)
    got = ", ".join(f"{list(x.shape)} {x.device.type}" if isinstance(x, Tensor) else type(x).__name__ for x in parts)
    scalar = f"[] {microbatch[0].device.type}"
    if got != f"{scalar}, {scalar}":
        raise Mistake(f"{shown}: {takes} must give (loss_sum, count), scalar tensors on its device, and gave ({got})")
    loss, count = answer
    if loss.dtype != torch.float32 or not loss.requires_grad:
        raise Mistake(f"{shown}: loss_sum must be float32 and depend on the parameters")
    if not torch.isfinite(loss):
        raise Mistake(f"{shown}: {takes} gives the loss {loss.item()}: no step could be made from it")
    if not torch.isfinite(count) or count < 0:
        raise Mistake(f"{shown}: {takes} gives the count {count.item()}: it is how many targets the loss is over")
    try:
        loss.backward()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        hint = ", or choose reduce=fast" if "deterministic" in str(error) else ""
        raise Mistake(
            f"{shown}: backward after {takes} failed: {_told(error, type(model))}: change it{hint}"
        ) from error
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    if idle := [name for name, gradient in gradients.items() if gradient is None]:
        raise Mistake(
            f"{shown}: the loss does not depend on {', '.join(idle)}: take them out, or name them in train.freeze"
        )
    if sparse := [name for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse]:
        raise Mistake(f"{shown}: {', '.join(sparse)} have sparse gradients, which can't be added up: give sparse=False")
    if moving := _changed(model, buffers):
        raise Mistake(
            f"{shown}: forward changes the buffers {', '.join(moving)}, which would depend on who computes what: {CURE}"
        )


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def _changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """The buffers that are not what they were, by their bits."""

    def same(a: Tensor, b: Tensor) -> bool:
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return alike and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))

    now: dict[str, Tensor] = dict(model.named_buffers())
    return [n for n in now | before if n not in now or n not in before or not same(now[n], before[n])]


def check_buffers(model: nn.Module, before: dict[str, Tensor], settings: OwnModel, world: World) -> None:
    """Raise Mistake in all processes if forward has changed a buffer in one. All call it, before each snapshot."""
    moving = {name for names in world.gather(_changed(model, before)) for name in names}
    if moving:
        raise Mistake(
            f"model._target_={settings.target}: forward has changed the buffers {', '.join(sorted(moving))} since the "
            f"last snapshot, and they depend on who computed what, so this step is not stored: {CURE}"
        )
