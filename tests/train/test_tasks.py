"""Tasks of lm-eval on our GPT: the figures of lm-eval's own model, in any world, with clear refusals."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

import model_kit
from bpe_kit import small
from mingpt.data.vocabulary import NoTokens, Numbers, TextVocabulary
from mingpt.errors import TransientError, UserError
from mingpt.model.language import LanguageModel
from mingpt.train.harness import Harness, NotMeasured
from mingpt.train.tasks import Tasks, check_text, load_tasks
from mingpt.weights.writing import folder_of, write_folder
from mingpt.world.world import World
from run_kit import TIME_LIMIT
from snapshot_kit import ALONE
from tasks_kit import TASKS, write_tasks

BLOCK = 32  # shorter than the pages, and than the first question with an answer


def model_of(vocabulary: int) -> LanguageModel:
    return model_kit.small("gpt", vocabulary, block_size=BLOCK)


def harness(vocabulary: TextVocabulary | None = None, world: World = ALONE, batch_size: int = 4) -> Harness:
    vocabulary = vocabulary or small()
    return Harness(model_of(vocabulary.size), vocabulary, world, nullcontext(), batch_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("kit") / "tasks")


@pytest.fixture
def tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load_tasks.cache_clear()
    return load_tasks("--tasks", TASKS, str(folder))


def requests_of(tasks: Tasks) -> dict[str, list[Instance]]:
    """By kind of request."""
    found = dict[str, list[Instance]]()
    for task in tasks["tasks"].values():
        task.build_all_requests()
        for instance in task.instances:
            found.setdefault(instance.request_type, []).append(instance)
    return found


def test_each_answer_is_that_of_lm_evals_own_model(tasks: Tasks, tmp_path: Path) -> None:
    """Also of questions that are cut, that are empty, and whose answers differ in one token; with the same weights."""
    pytest.importorskip("accelerate", reason="lm-eval's own model needs accelerate")
    from lm_eval.models.huggingface import HFLM

    ours, asked = harness(), requests_of(tasks)
    write_folder(f"{tmp_path}/out", folder_of(model_of(small().size), small()), overwrite=False)
    theirs = HFLM(pretrained=f"{tmp_path}/out", device="cpu", batch_size=4)
    assert max(len(small().encode(request.args[0])) for request in asked["loglikelihood"]) > BLOCK
    asked["loglikelihood"] += [Instance("loglikelihood", {}, ("", " king"), 0, ("kit_choice", 99, 1))]
    found, expected = ours.loglikelihood(asked["loglikelihood"]), theirs.loglikelihood(asked["loglikelihood"])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], abs=1e-4, rel=0)
    pages = asked["loglikelihood_rolling"]
    assert ours.loglikelihood_rolling(pages) == pytest.approx(theirs.loglikelihood_rolling(pages), rel=1e-5)


@dataclass(frozen=True)
class Other(World):
    """The first of two processes; the second one has its own answers."""

    answer: Callable[[Any], list[Any]] = list

    def gather(self, value: Any) -> list[Any]:
        return self.answer(value)


def in_threads(size: int, ask: Callable[[Harness], Any]) -> list[Any]:
    """What each process of a world of this size gets, whose processes are threads."""
    answers, meeting, said = [None] * size, threading.Barrier(size), dict[int, Any]()

    def gather(rank: int, value: Any) -> list[Any]:
        said[rank] = value
        meeting.wait(200)
        everything = [said[r] for r in range(size)]
        meeting.wait(200)
        return everything

    worlds = [Other(r, size, r, torch.device("cpu"), "gloo", answer=partial(gather, r)) for r in range(size)]
    ours = [harness(world=world, batch_size=2) for world in worlds]  # here: threads share their random numbers

    def answer(rank: int) -> None:
        answers[rank] = ask(ours[rank])

    threads = [threading.Thread(target=answer, args=[rank], daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def test_the_answers_are_the_same_in_any_world_and_in_all_its_processes(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests_of(tasks)

    def everything(one: Harness) -> list[Any]:
        return [getattr(one, kind)(requests) for kind, requests in asked.items()]

    alone = everything(harness(batch_size=2))
    monkeypatch.setattr("mingpt.train.harness.ROUND", 2)  # several rounds, the last of which is not full
    for answers in in_threads(3, everything):
        assert answers == alone  # to the bit: each batch is computed whole


@pytest.mark.parametrize("between", [True, False])
def test_what_is_wrong_in_one_process_is_known_to_all(
    tasks: Tasks, between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process waits for one that has failed, whether that was between the exchanges or after them."""
    asked = requests_of(tasks)["loglikelihood"]
    monkeypatch.setattr("mingpt.train.harness.ROUND", 2)
    wrong = FloatingPointError("the logits\nare not finite")

    def ask(one: Harness) -> None:
        if one.world.rank == 1 and between:
            one._score = lambda batch: raise_it(wrong)  # type: ignore[method-assign,assignment,return-value]
        one.loglikelihood(asked)
        if one.world.rank == 1:
            raise_it(wrong)

    def told(one: Harness) -> str:
        with pytest.raises(NotMeasured) as failed:
            one.together(lambda: ask(one))
        return str(failed.value)

    assert in_threads(2, told) == ["FloatingPointError: the logits"] * 2


def test_a_process_with_other_questions_is_told() -> None:
    different = Other(0, 2, 0, torch.device("cpu"), "gloo", answer=lambda value: [value, [None, "another hash"]])
    with pytest.raises(UserError, match="different requests"):
        harness(world=different).loglikelihood([Instance("loglikelihood", {}, ("the", " king"), 0, ("t", 0, 1))])


@pytest.mark.slow
def test_the_hubs_client_is_set_up_before_data_is_asked_for() -> None:
    """In a process of its own: the client reads its settings when it is imported."""
    script = """
from contextlib import suppress
from mingpt.errors import UserError
from mingpt.train.tasks import load_tasks
with suppress(UserError):
    load_tasks("--tasks", ("x",), "/no/folder")
from huggingface_hub import constants, get_session
hooks = [hook.__qualname__ for hook in get_session().event_hooks["request"]]
assert constants.HF_HUB_DISABLE_TELEMETRY and "set_up.<locals>.limit" in hooks
"""
    env = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK")}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=TIME_LIMIT, env=env)


def test_what_can_not_be_answered_is_told(folder: Path) -> None:
    with pytest.raises(UserError, match=r" O O.* 80 tokens"):
        harness().loglikelihood([Instance("loglikelihood", {}, ("the", " O" * 40), 0, ("long", 0, 1))])
    load_tasks.cache_clear()
    with pytest.raises(UserError, match=r"--tasks: kit_generate .*export"):
        load_tasks("--tasks", ("kit_generate",), str(folder))
    for vocabulary in (Numbers(9), NoTokens()):
        with pytest.raises(UserError, match="--tasks: "):
            check_text("--tasks", vocabulary)


def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any hub may be down; where it was told to be offline, another try is of no use."""
    folder = write_tasks(tmp_path / "tasks")
    (folder / "questions.jsonl").unlink()
    (folder / "far.yaml").write_text("task: far\ndataset_path: nobody/nothing\noutput_type: multiple_choice\n")

    def refused(task: str, error: type[Exception], match: str) -> None:
        load_tasks.cache_clear()
        with pytest.raises(error, match=match):
            load_tasks("--tasks", (task,), str(folder))

    refused("kit_choice", UserError, r"--tasks=kit_choice: FileNotFoundError: .*questions\.jsonl")
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: raise_it(ConnectionError("Couldn't reach it")))
    for offline, error in (("1", UserError), ("", TransientError)):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        refused("far", error, "--tasks=far: ")
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    refused("kit_choice", UserError, r"lm-eval .*\[eval\]")


def raise_it(error: Exception) -> None:
    raise error
