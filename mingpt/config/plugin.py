"""Code of the user's own: what a section's `_target_` names.

They are read from the command line alone. A snapshot's config names them too, and no reader of a snapshot comes here.
"""

import importlib
import inspect
import json
import math
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any

from mingpt.config.imports import imported_sha256, search_here_too
from mingpt.config.section import Own
from mingpt.errors import UserError

# What code of a section is given besides its keys, if it has a parameter of this name.
SUPPLIED = {
    "model": ("vocab_size", "block_size"),
    "data": ("block_size", "micro_size"),
    "optimizer": (),
    "schedule": ("step",),
    "observers": ("run_dir", "attempt"),
}
BESIDE = ("optimizer", "schedule")  # sections whose own keys stay where code of the user's own is named
TRIED = 1000  # steps for which a schedule is asked before a run
BOUND = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def problem(section: str, settings: Own, steps: int) -> str | None:
    """What is wrong with a section's `_target_` and its arguments, before a run of it begins; None: nothing.

    steps: of the run. A model, data and observers are not made yet, which may take long, or write files.
    """
    try:
        target = find(section, settings.target)
        _check_arguments(section, settings, target)
        if section == "schedule":
            _try_schedule(settings, steps)
    except UserError as mistake:
        return str(mistake)
    return None


def find(section: str, path: str) -> Callable[..., Any]:
    """The class or function of a dotted path. Raises UserError."""
    shown = f"{section}._target_={path}"
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise UserError(f"{shown}: name a class or function: package.module.Name")
    search_here_too()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            cure = "the examples are in the project's checkout, not in the installed package: start in the checkout"
            if missing != "examples":
                cure = "check the spelling, and start in the folder that it lies in"
            raise UserError(f"{shown}: there is no module {missing!r}: {cure}, or put that on PYTHONPATH") from error
        raise UserError(f"{shown}: importing {module_name} failed: {describe(error, None)}") from error
    target = getattr(module, name, None)
    if target is None:
        close = get_close_matches(name, dir(module), n=1)
        hint = f" (did you mean {module_name}.{close[0]}?)" if close else ""
        raise UserError(f"{shown}: the module {module_name} has no {name}{hint}")
    if not callable(target):
        raise UserError(f"{shown} is a {type(target).__name__}, neither a class nor a function")
    # The code has imported torch: not imported at the top, since most configs name none, and are judged without torch.
    from torch import nn
    from torch.optim import Optimizer

    if section == "model" and isinstance(target, type):
        if not issubclass(target, nn.Module):
            raise UserError(f"{shown} is no torch.nn.Module: derive the class from it")
        if target.forward is nn.Module.forward:
            raise UserError(f"{shown} has no forward: give it forward(tokens, targets) -> (loss_sum, count)")
    if section == "optimizer" and isinstance(target, type) and issubclass(target, Optimizer):
        raise UserError(
            f"{shown} is a torch.optim.Optimizer, which updates all parameters itself, and here a process has slices: "
            "write the update of one tensor, as in examples/own_optimizer.py"
        )
    if section == "observers" and isinstance(target, type) and not callable(getattr(target, "on", None)):
        raise UserError(f"{shown} has no method on(event): give it one, as mingpt.observe.events.Observer has")
    return target


def _check_arguments(section: str, settings: Own, target: Callable[..., Any]) -> None:
    """Raise UserError unless the section's keys are arguments that the target takes."""
    shown = f"{section}._target_={settings.target}"
    arguments = settings.arguments
    for key, value in arguments.items():
        try:
            json.dumps(value, allow_nan=False)  # what manifests are written in
        except (TypeError, ValueError) as error:
            raise UserError(f"{section}.{key}={value!r}: must be a plain, finite value") from error
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # written in C: it will say so itself
        return
    keys = _keys(section, settings).keys()
    supplied = {*SUPPLIED[section], *keys}
    named, missing, shadowing, takes_any = list[str](), list[str](), list[str](), False
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind not in BOUND:
            named.append(name)
            if parameter.default is parameter.empty:
                if name not in arguments and name not in supplied:
                    missing.append(f"{section}.{name} is missing")
            elif name in keys:
                shadowing.append(
                    f"{name} is also a key of {section}: leave its default out to be given that, or rename the argument"
                )
    problems = [*missing, *shadowing]
    if not takes_any:
        for name in sorted(arguments.keys() - {*named}):
            close = get_close_matches(name, named, n=1)
            hint = f" (did you mean {section}.{close[0]}?)" if close else ""
            problems.append(f"{section}.{name} is no argument of it{hint}")
    if problems:
        raise UserError(f"{shown} takes ({', '.join(named)}): {'; '.join(problems)}")


def _keys(section: str, settings: Own) -> dict[str, Any]:
    """The keys of a section that has the same ones without code of the user's own. That code may want them, too."""
    if section not in BESIDE:
        return {}
    return {name: getattr(settings, name) for name in type(settings).model_fields if name != "target"}


def call(section: str, settings: Own, **supplied: Any) -> Any:
    """What the target gives for its arguments. Raises UserError if it fails."""
    return bound(section, settings, **supplied)()


def bound(section: str, settings: Own, **supplied: Any) -> Callable[..., Any]:
    """The target, which has its arguments but for those that it is called with. Raises UserError if it fails then."""
    target = find(section, settings.target)
    supplied |= _keys(section, settings)
    try:
        wanted = inspect.signature(target).parameters.keys()
    except (TypeError, ValueError):
        wanted = {}.keys()
    arguments = {name: value for name, value in supplied.items() if name in wanted} | settings.arguments

    def called(**more: Any) -> Any:
        try:
            return target(**arguments, **more)
        except (UserError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            # A key of the config by its whole name: `data.key=…` is known for a secret where it is printed.
            named = {f"{section}.{k}" if k in settings.arguments else k: v for k, v in (more | arguments).items()}
            shown = ", ".join(f"{k}={v!r}" for k, v in named.items())
            raise UserError(
                f"{section}._target_={settings.target} failed with ({shown}): {describe(error, target)}"
            ) from error

    return called


def schedule(settings: Own) -> Callable[[int], float]:
    """The learning rate of a step, counted from 0, as a share of its peak. Raises UserError if it is none."""
    function, shown = bound("schedule", settings), f"schedule._target_={settings.target}"

    def share(step: int) -> float:
        value = function(step=step)
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise UserError(
                f"{shown} gives {value!r} for step {step}: give a finite number from 0, a share of the peak"
            )
        return float(value)

    return share


def _try_schedule(settings: Own, steps: int) -> None:
    """Raise UserError unless it gives a share of the peak for steps of the whole run, and the same one again."""
    some = [*range(0, steps, -(-steps // TRIED)), steps - 1]
    first, again = (list(map(schedule(settings), some)) for _ in range(2))
    for step, a, b in zip(some, first, again, strict=True):
        if a != b:
            raise UserError(
                f"schedule._target_={settings.target} gives another number for step {step} when it is asked again: "
                f"it must follow from the step and its arguments alone"
            )


def code(section: str, settings: Own) -> tuple[str | None, str | None]:
    """sha256 of the file that the target is written in, and of what that imports: other code computes other bits."""
    try:
        file = inspect.getsourcefile(find(section, settings.target))
        source = sha256(Path(file).read_bytes()).hexdigest() if file else None
    except (TypeError, OSError):
        source = None
    return source, imported_sha256(settings.target)


def describe(error: BaseException, target: object) -> str:
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
    return f"{type(error).__name__}: {lines[0]}{place}"
