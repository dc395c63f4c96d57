"""Tasks of lm-eval on our GPT: the figures of lm-eval's own model, in any world, with clear refusals."""

import math
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from bpe_kit import small
from mingpt.data.vocabulary import Bytes, Characters, NoTokens, Numbers, TextVocabulary
from mingpt.errors import TransientError, UserError
from mingpt.model.kinds.gpt import GPTModel
from mingpt.model.kinds.modern import ModernModel
from mingpt.model.language import LanguageModel
from mingpt.train.harness import Harness, NotMeasured, Stopped
from mingpt.train.tasks import Tasks, _same_random_numbers, check_text, figures, load_tasks, measure
from mingpt.weights.writing import folder_of, write_folder
from mingpt.world.world import Progress, World
from run_kit import TIME_LIMIT
from snapshot_kit import ALONE
from tasks_kit import TASKS, WORDS, write_tasks

BLOCK = 32  # shorter than the pages, and than the first question with an answer


def vivid(vocab_size: int, kind: type[GPTModel] | type[ModernModel] = GPTModel) -> LanguageModel:
    torch.manual_seed(1)
    model = kind(n_layer=2, n_head=2, n_embd=16, block_size=BLOCK).build(vocab_size).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def harness(vocabulary: TextVocabulary | None = None, world: World = ALONE, batch_size: int = 4) -> Harness:
    vocabulary = vocabulary or small()
    return Harness(vivid(vocabulary.size), vocabulary, world, nullcontext(), batch_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("kit") / "tasks")


@pytest.fixture
def tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load_tasks.cache_clear()
    return load_tasks("--tasks", TASKS, str(folder))


@pytest.fixture(scope="module", params=[GPTModel, ModernModel])
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lm-eval's own model, of the same weights as an export writes them, and ours."""
    pytest.importorskip("accelerate", reason="lm-eval's own model needs accelerate")
    from lm_eval.models.huggingface import HFLM

    out = str(tmp_path_factory.mktemp("export"))
    model = vivid(small().size, request.param)
    write_folder(out, folder_of(model, small()), overwrite=False)
    return HFLM(pretrained=out, device="cpu", batch_size=4), Harness(model, small(), ALONE, nullcontext(), 4)


def requests_of(tasks: Tasks) -> dict[str, list[Instance]]:
    """By kind of request."""
    found = dict[str, list[Instance]]()
    for task in tasks["tasks"].values():
        task.build_all_requests()
        for instance in task.instances:
            found.setdefault(instance.request_type, []).append(instance)
    return found


def test_the_figures_are_those_of_lm_evals_own_model(tasks: Tasks, theirs: Any, folder: Path) -> None:
    model, ours = theirs
    expected = simple_evaluate(
        model, tasks=list(TASKS), task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=1000,
    )  # fmt: skip
    assert expected is not None
    found = measure(tasks, ours, None, errors=True)
    for name, metric in (("kit_choice", "acc"), ("kit_choice", "acc_norm"), ("kit_generate", "exact_match")):
        for key in (f"{metric},none", f"{metric}_stderr,none"):
            assert found["results"][name][key] == expected["results"][name][key]
    for metric in ("word_perplexity", "bits_per_byte"):
        value = expected["results"]["kit_rolling"][f"{metric},none"]
        assert found["results"]["kit_rolling"][f"{metric},none"] == pytest.approx(value, rel=1e-5)
    assert {k: found[k] for k in ("versions", "n-shot", "n-samples")} == {
        k: expected[k] for k in ("versions", "n-shot", "n-samples")
    }


def test_each_answer_is_that_of_lm_evals_own_model(tasks: Tasks, theirs: Any) -> None:
    """Also of questions that are cut, that are empty, and whose answers differ in one token."""
    asked, (theirs, ours) = requests_of(tasks), theirs
    contexts = {request.args[0] for request in asked["loglikelihood"]}
    assert max(len(small().encode(context)) for context in contexts) > BLOCK
    asked["loglikelihood"] += [
        Instance("loglikelihood", {}, ("", answer), i, ("kit_choice", 99, 1)) for i, answer in enumerate((" king", "O"))
    ]
    found, expected = ours.loglikelihood(asked["loglikelihood"]), theirs.loglikelihood(asked["loglikelihood"])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [x for x, _ in found] == pytest.approx([x for x, _ in expected], abs=1e-4, rel=0)
    long = ours.loglikelihood_rolling(asked["loglikelihood_rolling"])
    assert long == pytest.approx(theirs.loglikelihood_rolling(asked["loglikelihood_rolling"]), abs=1e-3)
    asked["generate_until"] = [request for request in asked["generate_until"] if request.args[0]]  # theirs: all padding
    texts = ours.generate_until(asked["generate_until"])
    assert texts == theirs.generate_until(asked["generate_until"])
    assert len(set(texts)) > 3
    for request in asked["generate_until"]:
        request.args[1]["until"] = ["e"]
    stopped = ours.generate_until(asked["generate_until"])
    assert stopped == theirs.generate_until(asked["generate_until"])
    assert stopped != texts
    assert not any("e" in text for text in stopped)


@dataclass(frozen=True)
class Threads(World):
    """A world whose processes are threads."""

    meeting: threading.Barrier | None = None
    said: dict[int, Any] = field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        assert self.meeting is not None
        self.said[self.rank] = value
        self.meeting.wait(200)
        everything = [self.said[rank] for rank in range(self.size)]
        self.meeting.wait(200)
        return everything


def in_threads(size: int, ask: Callable[[Harness], Any]) -> list[Any]:
    """What each process of a world of this size gets."""
    answers, meeting, said = [None] * size, threading.Barrier(size), dict[int, Any]()
    worlds = [Threads(r, size, r, torch.device("cpu"), "gloo", meeting=meeting, said=said) for r in range(size)]
    ours = [harness(world=world, batch_size=2) for world in worlds]  # here: threads share their random numbers

    def answer(rank: int) -> None:
        answers[rank] = ask(ours[rank])

    threads = [threading.Thread(target=answer, args=[rank], daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


@pytest.mark.parametrize("size", [2, 3])
def test_the_answers_are_the_same_in_any_world_and_in_all_its_processes(
    tasks: Tasks, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests_of(tasks)

    def everything(one: Harness) -> list[Any]:
        return [getattr(one, kind)(requests) for kind, requests in asked.items()]

    alone = everything(harness(batch_size=2))
    monkeypatch.setattr("mingpt.train.harness.ROUND", 2)  # several rounds, the last of which is not full
    for answers in in_threads(size, everything):
        assert answers == alone  # to the bit: each batch is computed whole


def test_a_stop_of_one_process_ends_the_measurement_in_all(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, until = requests_of(tasks)["loglikelihood"], Progress.microbatches + 5
    monkeypatch.setattr("mingpt.train.harness.ROUND", 2)

    def stopped(one: Harness) -> bool:
        one.stop = lambda: one.world.rank == 1 and Progress.microbatches >= until
        try:
            one.loglikelihood(asked)
        except Stopped:
            return True
        return False

    assert in_threads(2, stopped) == [True, True]
    assert Progress.microbatches <= until + 4  # of some 20 batches


def test_what_is_wrong_in_one_process_is_known_to_all(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process waits for one that has failed, wherever that was: before, between or after the exchanges."""
    asked = requests_of(tasks)["loglikelihood"]
    monkeypatch.setattr("mingpt.train.harness.ROUND", 2)

    def failing(when: str) -> Callable[[Harness], str]:
        def ask(one: Harness) -> None:
            fails = one.world.rank == 1
            if fails and when == "before":
                raise KeyError("no such column")
            if fails and when == "between":
                one._score = lambda batch: raise_it(FloatingPointError("the logits\nare not finite"))  # type: ignore[method-assign,assignment,return-value]
            one.loglikelihood(asked)
            if fails and when == "after":
                raise UserError("the metric has no figure")

        def told(one: Harness) -> str:
            with pytest.raises(NotMeasured) as failed:
                one.together(lambda: ask(one))
            return str(failed.value)

        return told

    for when, message in (
        ("before", "KeyError: 'no such column'"),
        ("between", "FloatingPointError: the logits"),
        ("after", "the metric has no figure"),
    ):
        assert in_threads(2, failing(when)) == [message] * 2


def test_a_lost_process_is_no_fault_of_a_task() -> None:
    @dataclass(frozen=True)
    class Lost(World):
        def gather(self, value: Any) -> list[Any]:
            asked.append(value)
            raise RuntimeError("Connection closed by peer")

    asked = list[Any]()
    one = harness(world=Lost(0, 2, 0, torch.device("cpu"), "gloo"))
    with pytest.raises(RuntimeError, match="closed by peer"):
        one.together(lambda: one.generate_until([Instance("generate_until", {}, ("the", {}), 0, ("t", 0, 1))]))
    assert len(asked) == 1  # it does not wait for that one again


def test_processes_with_other_questions_are_told() -> None:
    @dataclass(frozen=True)
    class Other(World):
        def gather(self, value: Any) -> list[Any]:
            return [value, [None, "another hash"]]

    one = harness(world=Other(0, 2, 0, torch.device("cpu"), "gloo"))
    with pytest.raises(UserError, match="different requests: the tasks' data are not the same on all nodes"):
        one.loglikelihood([Instance("loglikelihood", {}, ("the", " king"), 0, ("t", 0, 1))])


def test_measuring_draws_none_of_trainings_numbers_and_gives_the_same_again(folder: Path) -> None:
    load_tasks.cache_clear()
    tasks = load_tasks("--tasks", ("kit_choice",), str(folder), fewshot=2)
    one = harness()
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    first = measure(tasks, one, 5)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected
    again = measure(tasks, one, 5)  # with the same examples before each question
    assert figures(again) == figures(first)
    assert again["n-shot"] == {"kit_choice": 2}
    assert again["n-samples"]["kit_choice"]["effective"] == 5


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_of_the_gpus_only_the_worlds_own_is_touched(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, written = list[str](), list[str]()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda which: read.append(str(which)))
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda state, which: written.append(str(which)))
    with warnings.catch_warnings(action="error"), _same_random_numbers(torch.device(device)):
        pass
    assert read == written == ([device] if device != "cpu" else [])


def test_the_hubs_client_is_set_up_before_data_is_asked_for() -> None:
    """In a process of its own: the client reads its settings when it is imported."""
    script = """
from mingpt.errors import UserError
from mingpt.train.tasks import load_tasks
try:
    load_tasks("--tasks", ("x",), "/no/folder")
except UserError:
    from huggingface_hub import constants, get_session
    hooks = [hook.__qualname__ for hook in get_session().event_hooks["request"]]
    print(constants.HF_HUB_DISABLE_TELEMETRY, "set_up.<locals>.limit" in hooks)
"""
    env = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK")}
    options = {"capture_output": True, "text": True, "timeout": TIME_LIMIT, "env": env}
    found = subprocess.run([sys.executable, "-c", script], **options)  # type: ignore[call-overload]
    assert found.stdout == "True True\n", found.stderr


def test_figures_have_a_tasks_name_and_a_groups_parts_are_left_out(tasks: Tasks, folder: Path) -> None:
    assert sorted(figures(measure(tasks, harness(), 2))) == [
        "kit_choice/acc",
        "kit_choice/acc_norm",
        "kit_generate/exact_match",
        "kit_rolling/bits_per_byte",
        "kit_rolling/word_perplexity",
    ]
    load_tasks.cache_clear()
    group = measure(load_tasks("--tasks", ("kit_group",), str(folder)), harness(), None)
    assert list(figures(group)) == ["kit_group/acc"]
    metrics = {"alias": "x", "sample_len": 3, "exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1}
    assert figures({"results": {"x": metrics}, "group_subtasks": {}}) == {"x/exact_match/strict": 0.5}


@pytest.mark.parametrize("vocabulary", [Bytes(), Characters("".join(sorted({*" ".join(WORDS), *"\nto"})))])
def test_a_model_of_characters_or_bytes_answers(tasks: Tasks, vocabulary: TextVocabulary) -> None:
    """A line feed stands before a text: they have no end of text."""
    one = harness(vocabulary)
    assert one.eot_token_id is None
    assert vocabulary.decode([one.prefix_token_id]) == "\n"
    found = figures(measure(tasks, one, None))
    assert 0 < found["kit_rolling/bits_per_byte"] < math.inf
    assert 0 <= found["kit_choice/acc_norm"] <= 1


def test_of_a_question_that_is_too_long_its_end_is_read() -> None:
    one, question, settings = harness(Bytes()), "the king is dead, long live the king, O woe", {"max_gen_toks": 9}
    answer = " king"
    scores = [
        one.loglikelihood([Instance("loglikelihood", {}, (question[-n:], answer), 0, ("t", 0, 1))])[0][0]
        for n in (len(question), BLOCK + 1 - len(answer), BLOCK - len(answer))  # the last token of all is no input
    ]
    assert scores[0] == scores[1] != scores[2]
    texts = [
        one.generate_until([Instance("generate_until", {}, (question[-n:], {"until": []} | settings), 0, ("t", 0, 1))])
        for n in (len(question), BLOCK - 9)  # what is generated has room
    ]
    assert texts[0] == texts[1]


def test_a_text_that_is_generated_may_be_longer_than_the_block() -> None:
    settings = {"until": [], "max_gen_toks": 2 * BLOCK}
    [text] = harness(Bytes()).generate_until([Instance("generate_until", {}, ("the", settings), 0, ("t", 0, 1))])
    assert text


def test_what_the_vocabulary_lacks_is_told_with_the_task(folder: Path, tmp_path: Path) -> None:
    load_tasks.cache_clear()
    other = write_tasks(tmp_path / "tasks", also=" café")
    tasks = load_tasks("--tasks", ("kit_choice",), str(other))
    with pytest.raises(UserError, match="task kit_choice: the text has characters that the model never saw: 'cfé'"):
        measure(tasks, harness(Characters("".join(sorted(set(" ".join(WORDS)) - set("cf"))))), None)


def test_what_the_model_cannot_answer_is_told() -> None:
    one = harness()
    with pytest.raises(UserError, match=r"task long: the answer ' O O.*' has 80 tokens, and the model takes 1 to 32"):
        one.loglikelihood([Instance("loglikelihood", {}, ("the", " O" * 40), 0, ("long", 0, 1))])
    settings = {"until": ["x"], "num_beams": 4}
    with pytest.raises(UserError, match="task beams: generates with num_beams"):
        one.generate_until([Instance("generate_until", {}, ("the", settings), 0, ("beams", 0, 1))])
    for vocabulary, kind in ((Numbers(9), "numbers"), (NoTokens(), "none")):
        with pytest.raises(UserError, match=rf"--tasks: the model's tokens are no text \(a {kind} vocabulary\)"):
            check_text("--tasks", vocabulary)


def test_what_is_not_there_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_tasks.cache_clear()
    with pytest.raises(UserError, match=r"there is no task kit_chioce \(did you mean kit_choice"):
        load_tasks("--tasks", ("kit_rolling", "kit_chioce"), str(folder))
    with pytest.raises(UserError, match=r"--tasks: there is no folder .*/none with tasks"):
        load_tasks("--tasks", ("kit_choice",), f"{tmp_path}/none")
    other = write_tasks(tmp_path / "tasks")
    (other / "questions.jsonl").unlink()
    with pytest.raises(UserError, match=r"--tasks=kit_choice: FileNotFoundError: .*questions\.jsonl"):
        load_tasks("--tasks", ("kit_choice",), str(other))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match=r"needs the package lm-eval .*: pip install -e '\.\[eval\]'"):
        load_tasks("--tasks", ("kit_choice",), str(folder))


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_that_cannot_be_reached_is_told(tmp_path: Path, offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any hub may be down; where it was told to be offline, another try is of no use."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "")
    (tmp_path / "far.yaml").write_text("task: far\ndataset_path: nobody/nothing\noutput_type: multiple_choice\n")
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: raise_it(ConnectionError("Couldn't reach it")))
    load_tasks.cache_clear()
    with pytest.raises(UserError if offline else TransientError, match="--tasks=far: the data can't be fetched: Could"):
        load_tasks("--tasks", ("far",), str(tmp_path))


def raise_it(error: Exception) -> None:
    raise error
