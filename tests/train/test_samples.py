"""train.sample_every: texts of the weights in training, in log, metrics, trackers and report, which change no bit."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mingpt.errors import USER_ERROR
from mingpt.history.history import read_metrics
from mingpt.train import evaluation
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from replay_kit import settings_of, train_here
from told import Told
from verb_kit import mingpt, verified

SHORT = ("train.max_steps=8", "~track")
SAMPLES = (*SHORT, "train.sample_every=4")


def digests(run: str) -> list[str]:
    return [verified(run, step).digest for step in (4, 8)]


def test_texts_change_no_bit_and_are_shown_wherever_one_looks(
    tmp_path: Path, text: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_texts, without = f"{tmp_path}/with", f"{tmp_path}/without"
    run = (f"data.path={text}", f"data.cache_dir={cache}", "train.recompute=block", "precision=bf16")
    train_here(without, *run, *SHORT)
    train_here(with_texts, *run, *SAMPLES, f"train.sample_prompt={(prompt := text.read_text()[:4])}")
    assert digests(with_texts) == digests(without)
    rows = {row["step"]: row["sample"] for row in read_metrics(with_texts) if "sample" in row}
    assert [*rows] == [4, 8]
    assert all(len(sample) == 4 + evaluation.SAMPLE_TOKENS and sample.startswith(prompt) for sample in rows.values())
    assert rows[4] != rows[8]
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("step 4: sample") + 1] == f"    {rows[4].splitlines()[0]}"
    curves = EventAccumulator(with_texts).Reload()
    shown = {e.step: e.tensor_proto.string_val[0].decode() for e in curves.Tensors("train/sample/text_summary")}
    assert {step: shown.replace("    ", "") for step, shown in shown.items()} == {
        step: sample.replace("    ", "") for step, sample in rows.items()
    }
    mingpt(f"report {with_texts}")
    assert "<h2>Samples</h2>" in Path(with_texts, "report.html").read_text()


def test_data_without_texts_and_prompts_without_tokens_are_refused(
    tmp_path: Path, text: Path, cache: Path, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    places = (f"data.path={text}", f"data.cache_dir={cache}")
    for how in (("data=random",), (*places, "train.sample_prompt=QED")):
        assert attempt(settings_of(f"{tmp_path}/run", *SAMPLES, *how), Lifetime()) == USER_ERROR
    told(capsys.readouterr().err, tmp_path)


def test_the_others_do_not_wait_for_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, cache: Path
) -> None:
    monkeypatch.setattr(evaluation, "SAMPLE_SECONDS", 0.0)
    train_here(f"{tmp_path}/run", f"data.path={text}", f"data.cache_dir={cache}", *SAMPLES)
    assert {len(row["sample"]) for row in read_metrics(f"{tmp_path}/run") if "sample" in row} == {2}
