"""Tasks of lm-eval: find and load them, measure a model on them, and name their figures."""

import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mingpt import hub
from mingpt.config.schema import Config, Train
from mingpt.config.section import Own
from mingpt.data.vocabulary import Spelling, TextVocabulary, Vocabulary
from mingpt.errors import TransientError, UserError
from mingpt.model.language import LanguageModel
from mingpt.observe.events import TasksEvaluated
from mingpt.redact import printable
from mingpt.storage import install, limit_seconds
from mingpt.world.world import World

if TYPE_CHECKING:
    from mingpt.train.harness import Harness

Tasks = Mapping[str, Any]  # what lm-eval's TaskManager.load returns
Results = Mapping[str, Any]  # what its `evaluate` returns

SEED, FEWSHOT_SEED = 0, 1234  # lm-eval's own
BOOTSTRAPS = 1000  # for the standard error of a metric that is no mean
NEAREST = 3  # names in a message


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Tell what lm-eval, a data set or a task's own code raises in one line."""
    try:
        yield
    except UserError:
        raise
    except (ConnectionError, TimeoutError) as error:
        reason = f"{what}: the data can't be fetched: {printable(str(error).splitlines()[0])}"
        if os.environ.get("HF_HUB_OFFLINE"):
            raise UserError(f"{reason}: HF_HUB_OFFLINE is set, and HF_HOME does not have it") from error
        raise TransientError(f"{reason}: try again, or bring HF_HOME from a machine with a network") from error
    except Exception as error:
        shown = printable((str(error).splitlines() or [""])[0])
        raise UserError(f"{what}: {type(error).__name__}: {shown}") from error


@lru_cache(maxsize=1)  # an attempt loads them before it meets the others, and finds them again when they are due
def load_tasks(key: str, names: tuple[str, ...], folder: str | None, fewshot: int | None = None) -> Tasks:
    """Tasks, groups and tags by name or pattern, with their data.

    key: the option that names them. folder: of the user's own tasks; their code runs, as lm-eval's does. Raises
    UserError, and TransientError if data can't be fetched.
    """
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's processes would inherit our signal handlers
    try:
        hub.set_up(limit_seconds())  # before datasets imports its client
        import datasets
        import lm_eval.api.task
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"{key} needs the package lm-eval ({error}): {install('eval')}") from error
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"{key}: there is no folder {folder} with tasks: check the spelling")
    # In each process a bar for each small thing; and warnings, which are for who writes tasks.
    lm_eval.api.task.tqdm = partial(lm_eval.api.task.tqdm, disable=True)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    shown = f"{key}={','.join(names)}"
    random.seed(SEED)  # a task may shuffle its data
    with _told(shown):
        manager = TaskManager(include_path=folder, include_defaults=False) if folder else None
        if manager is None or not all(manager.match_tasks([name]) for name in names):
            manager = TaskManager(include_path=folder)  # reads thousands of files
        matches = {name: manager.match_tasks([name]) for name in names}
        if missing := [name for name, found in matches.items() if not found]:
            raise UserError(*(_unknown(key, name, manager.all_tasks) for name in missing))
        tasks: Tasks = manager.load(list(dict.fromkeys(name for found in matches.values() for name in found)))
    for name, task in tasks["tasks"].items():
        other = getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False)
        if other or task.OUTPUT_TYPE == "generate_until":
            raise UserError(f"{key}: {name} has images or generates text: `mingpt export`, then lm-eval --model hf")
        given = task.get_config("num_fewshot")
        if (fewshot is not None and given != 0) or given is None:  # lm-eval's own rule: 0 in a task's file stays
            task.set_config("num_fewshot", fewshot or 0)
    return tasks


def _unknown(key: str, name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=NEAREST, cutoff=0.6)
    return f"{key}: there is no task {name}" + (f" (did you mean {', '.join(near)}?)" if near else "")


def check_text(key: str, vocabulary: Vocabulary) -> TextVocabulary:
    """Raises UserError unless the vocabulary's tokens spell text."""
    if not isinstance(vocabulary, TextVocabulary) or not isinstance(vocabulary, Spelling):
        raise UserError(
            f"{key}: the model's tokens are no text (a {vocabulary.to_json()['kind']} vocabulary): leave it out"
        )
    return vocabulary


def measure(tasks: Tasks, harness: "Harness", limit: int | None, errors: bool = False) -> Results:
    """lm-eval's results. Collective: all processes call it and get the same figures.

    Tasks draw from generators that are seeded as lm-eval does; training seeds its own for each microbatch.
    limit: documents of each task. errors: estimate standard errors, too.
    """
    from lm_eval.evaluator import evaluate  # an optional package

    random.seed(SEED)
    np.random.seed(FEWSHOT_SEED)
    torch.manual_seed(FEWSHOT_SEED)
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(FEWSHOT_SEED)
    found: Results = evaluate(
        lm=harness, task_dict=tasks, limit=limit, bootstrap_iters=BOOTSTRAPS if errors else 0, log_samples=False
    )
    return found


def due(train: Train, done: int, last: bool) -> bool:
    """Whether train.eval_tasks are to be measured after this step."""
    every = train.eval_tasks_every
    return bool(train.eval_tasks) and (last or (every > 0 and done % every == 0))


def text_of(key: str, config: Config, vocabulary: Vocabulary) -> TextVocabulary:
    """The vocabulary of a GPT in training, for what needs its texts. Raises UserError if it has none."""
    if isinstance(config.model, Own):
        raise UserError(f"{key}: it asks a GPT, and model._target_ names another model: leave it out")
    return check_text(key, vocabulary)


def of_training(config: Config, vocabulary: Vocabulary) -> tuple[Tasks, TextVocabulary]:
    """The tasks of train.eval_tasks, and the vocabulary if its tokens spell text. Raises as load_tasks."""
    key, train = "train.eval_tasks", config.train
    text = text_of(key, config, vocabulary)
    return load_tasks(key, tuple(train.eval_tasks), train.eval_tasks_path), text


def after_step(
    done: int,
    model: LanguageModel,
    config: Config,
    vocabulary: Vocabulary,
    world: World,
    autocast: Any,
    stop: Callable[[], bool],
) -> TasksEvaluated | None:
    """The figures of train.eval_tasks, or why there are none: what is wrong with a task never ends a run. Collective.

    None: a process is asked to stop meanwhile.
    """
    from mingpt.train.harness import Harness, NotMeasured, Stopped  # imports lm-eval, an optional package

    tasks, text = of_training(config, vocabulary)
    harness = Harness(model.eval(), text, world, autocast, config.batch.micro_size, stop=stop)
    try:
        limit = config.train.eval_tasks_limit
        with torch.compiler.set_stance("force_eager"):  # rows of any length: each would be compiled
            return TasksEvaluated(done, harness.together(lambda: figures(measure(tasks, harness, limit))))
    except NotMeasured as problem:
        return TasksEvaluated(done, {}, str(problem))
    except Stopped:
        return None


def figures(results: Results) -> dict[str, float]:
    """Each group's and each single task's metrics: `hellaswag/acc`; `gsm8k/exact_match/strict-match` with a filter."""
    found: dict[str, dict[str, float]] = {}
    for name, metrics in results["results"].items():
        numbers = {key: value for key, value in metrics.items() if "," in key and isinstance(value, (int, float))}
        split = {key: key.partition(",") for key in numbers}
        found[name] = {
            metric if which == "none" else f"{metric}/{which}": float(numbers[key])
            for key, (metric, _, which) in split.items()
            if not metric.endswith("_stderr")
        }
    inner = {child for group, children in results["group_subtasks"].items() if found.get(group) for child in children}
    return {f"{name}/{key}": value for name, of in found.items() if name not in inner for key, value in of.items()}
