"""`mingpt snapshots` and `mingpt generate`: exit codes, and exactly what they print."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mingpt.commands import generate, snapshots
from mingpt.commands.loading import find_manifest
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.kinds.gpt import GPTModel
from mingpt.model.sampling import generate as continue_tokens
from mingpt.redact import escaped
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from snapshot_kit import PROVENANCE, save, signed, state_of

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory with the snapshots of steps 4 and 30."""
    store = Store(str(tmp_path / "snapshots"))
    save(store, 4, val_loss=1.25)
    save(store, 30)
    return tmp_path


def age(run: Path, step: int, seconds: float) -> None:
    """Make a step's files that old."""
    folder = run / "snapshots" / f"step-{step:09d}"
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - seconds,) * 2)


def digest(run: Path, step: int) -> str:
    return read(Store(f"{run}/snapshots"), step).manifest.digest


def damage(run: Path, step: int, file: str) -> str:
    [path] = run.glob(f"snapshots/step-{step:09d}/{file}")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    return path.name


def test_digest_prints_the_newest_digest_alone(run: Path, capsys: Captured) -> None:
    assert snapshots.main(["digest", str(run)]) == 0
    assert capsys.readouterr() == (f"{digest(run, 30)}\n", "")
    assert digest(run, 4) != digest(run, 30)


OF_STEP_4 = [["{run}", "--step", "4"], ["{run}@4"], ["{run}/snapshots@4"], ["{run}/snapshots/step-000000004"]]


@pytest.mark.parametrize("url", OF_STEP_4, ids=str)
def test_a_step_may_be_named_in_four_ways_for_each_command(
    run: Path, capsys: Captured, url: list[str], tmp_path: Path
) -> None:
    where = [word.format(run=run) for word in url]
    assert snapshots.main(["digest", *where]) == 0
    assert capsys.readouterr() == (f"{digest(run, 4)}\n", "")
    assert snapshots.main(["verify", *where]) == 0
    assert capsys.readouterr() == (f"step 4: good, digest {digest(run, 4)}\n", "")
    for command in ("list", "show"):
        assert snapshots.main([command, *where, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown[0] if command == "list" else shown)["step"] == 4
    assert snapshots.main(["copy", *where, str(tmp_path / "copy")]) == 0
    assert Store(f"{tmp_path}/copy/snapshots").steps() == [4]
    assert find_manifest(where[0], step=4)[1].step == 4  # what generate, evaluate and model.init_from open


@pytest.mark.parametrize(
    ("url", "step"),
    [
        ("{run}", 30),
        ("{run}/", 30),
        ("{run}/snapshots", 30),
        ("{run}/snapshots/", 30),
        ("{run}/snapshots/step-000000004", 4),
        ("{run}/snapshots/step-000000004/", 4),
        ("file://{run}", 30),
        (".", 30),
        ("snapshots", 30),
        ("snapshots/step-000000004", 4),
    ],
)
def test_a_url_is_a_run_its_snapshots_or_a_step(
    run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, url: str, step: int
) -> None:
    monkeypatch.chdir(run)
    assert snapshots.main(["digest", url.format(run=run)]) == 0
    assert capsys.readouterr().out == f"{digest(run, step)}\n"


def test_list_is_a_table_of_the_steps(run: Path, capsys: Captured) -> None:
    age(run, 30, 10)
    age(run, 4, 3 * 86400)
    assert snapshots.main(["list", str(run)]) == 0
    assert capsys.readouterr() == (
        "step  age   size     digest            loss    val_loss  state\n"
        f"30    10 s  0.3 KiB  {digest(run, 30)[:16]}  3.7500  -         looks good\n"
        f"4     3 d   0.3 KiB  {digest(run, 4)[:16]}  0.5000  1.2500    looks good\n",
        "",
    )
    assert snapshots.main(["list", str(run), "--step", "4"]) == 0
    assert capsys.readouterr().out.count("\n") == 2


def test_list_names_a_damaged_manifest_and_exits_1(run: Path, capsys: Captured) -> None:
    damage(run, 30, "manifest.json")
    assert snapshots.main(["list", str(run)]) == 1
    _, bad, good = capsys.readouterr().out.splitlines()
    assert re.match(r"30 +0 s +\S+ KiB +- +- +- +DAMAGED: manifest\.json ", bad)
    assert re.match(f"4 .* {digest(run, 4)[:16]} .*looks good$", good)


def test_verify_says_good_of_each_step(run: Path, capsys: Captured) -> None:
    assert snapshots.main(["verify", str(run)]) == 0
    assert capsys.readouterr() == (
        f"step 30: good, digest {digest(run, 30)}\nstep 4: good, digest {digest(run, 4)}\n",
        "",
    )


@pytest.mark.parametrize(("file", "tensor"), [("model-*", "b"), ("optimizer-*", "w.step")])
def test_a_damaged_part_is_named(run: Path, capsys: Captured, file: str, tensor: str) -> None:
    name = damage(run, 4, file)
    what = f"{run}/snapshots/step-000000004: {name}: {tensor} does not match its checksum in the manifest"
    assert snapshots.main(["verify", str(run)]) == 1
    assert capsys.readouterr() == (f"step 30: good, digest {digest(run, 30)}\nstep 4: DAMAGED: {what}\n", "")
    assert snapshots.main(["verify", str(run), "--step", "30"]) == 0
    capsys.readouterr()
    assert snapshots.main(["digest", str(run), "--step", "4"]) == 1
    assert capsys.readouterr() == ("", f"error: {what}\n")
    assert snapshots.main(["digest", str(run)]) == 0
    capsys.readouterr()
    assert snapshots.main(["list", str(run)]) == 0  # reads manifests only


def test_looking_changes_nothing(run: Path) -> None:
    damage(run, 30, "model-*")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for command in ("list", "verify", "digest", "show"):
        snapshots.main([command, str(run)])
    snapshots.main(["prune", str(run), "--keep", "1", "--dry-run"])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "--step", "5"], "{run}/snapshots: no snapshot of step 5; there are 4, 30"),
        (
            ["{run}/snapshots/step-000000004", "--step", "30"],
            "{run}/snapshots/step-000000004 names step 4, and --step 30: leave out one",
        ),
        (["{run}@5"], "{run}/snapshots: no snapshot of step 5; there are 4, 30"),
        (["{run}/snapshots/step-000000005"], "{run}/snapshots: no snapshot of step 5; there are 4, 30"),
        (
            ["{run}/nowhere"],
            "{run}/nowhere: no snapshot is there: check the spelling; give a run's directory, its snapshots folder, or "
            "a step's folder",
        ),
        (["nope://x"], "URL=nope://x: Protocol not known: nope: use a local path, s3://…, gs://… or az://…"),
    ],
)
def test_what_is_not_there_is_a_mistake(run: Path, capsys: Captured, arguments: list[str], message: str) -> None:
    filled = [argument.format(run=run) for argument in arguments]
    for command in (["list"], ["verify"], ["digest"], ["show"]):
        assert snapshots.main([*command, *filled]) == 64
        assert capsys.readouterr() == ("", f"error: {message.format(run=run)}\n")
    assert generate.main(filled) == 64
    assert capsys.readouterr() == ("", f"error: {message.format(run=run)}\n")


VOCABULARY = "\n abc"


def gpt(seed: int, size: int = len(VOCABULARY)) -> GPT:
    """Weights large enough for text that depends on them."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=size, block_size=8, n_layer=1, n_head=2, n_embd=8, vocab_multiple=4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)
    return model


def train(folder: Path, step: int, kind: str = "char") -> GPT:
    """A snapshot as the trainer writes it."""
    characters = VOCABULARY if kind == "char" else ""
    model = gpt(step, len(characters) or 256)
    settings = GPTModel(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_multiple=4)
    provenance = PROVENANCE | {
        "vocabulary": {"kind": kind, "characters": characters},
        "config": {"model": settings.model_dump()},
    }
    state = {"model": model.state_dict(), "optimizer": state_of(step)["optimizer"]}
    save(Store(f"{folder}/snapshots"), step, state, provenance=provenance)  # type: ignore[arg-type]
    return model


def test_generate_continues_the_prompt_with_the_newest_model(tmp_path: Path, capsys: Captured) -> None:
    older, newer = train(tmp_path, 9), train(tmp_path, 10)
    ids = torch.tensor([[VOCABULARY.index(c) for c in "ab a"]])
    texts = []
    for model, step in ((newer, []), (older, ["--step", "9"])):
        expected = continue_tokens(model, ids, 40, temperature=30, top_k=2, seed=7)[0].tolist()
        texts.append("".join(VOCABULARY[i] for i in expected))
        arguments = "--prompt", "ab a", "--tokens", "40", "--temperature", "30", "--top-k", "2", "--seed", "7"
        assert generate.main([str(tmp_path), *arguments, *step]) == 0
        assert capsys.readouterr() == (texts[-1] + "\n", "")
        assert texts[-1].startswith("ab a")
        assert len(texts[-1]) == 44
        # Each option counts: without it the text is another one.
        others = {"temperature": 0.1, "top_k": 2}, {"temperature": 30, "top_k": None}
        for other in others:
            assert continue_tokens(model, ids, 40, seed=7, **other)[0].tolist() != expected
    assert texts[0] != texts[1]


def test_the_same_seed_gives_the_same_text(tmp_path: Path, capsys: Captured) -> None:
    train(tmp_path, 1)
    texts = []
    for seed in (1, 1, 2):
        assert generate.main([str(tmp_path), "--tokens", "60", "--temperature", "2", "--seed", str(seed)]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("\n")
    assert len(texts[0]) == 1 + 60 + 1


def test_bytes_are_decoded_and_what_is_no_utf_8_replaced(tmp_path: Path, capsys: Captured) -> None:
    model = train(tmp_path, 1, kind="byte")
    ids = continue_tokens(model, torch.tensor([list("é".encode())]), 20, temperature=0)[0].tolist()
    assert generate.main([str(tmp_path), "--prompt", "é", "--tokens", "20", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == escaped(bytes(ids).decode(errors="replace")) + "\n"  # no code moves the cursor


def test_generate_needs_no_good_optimizer_but_a_good_model(tmp_path: Path, capsys: Captured) -> None:
    train(tmp_path, 1)
    damage(tmp_path, 1, "optimizer-*")
    assert generate.main([str(tmp_path)]) == 0
    capsys.readouterr()
    name = damage(tmp_path, 1, "model-*")
    assert generate.main([str(tmp_path)]) == 64
    assert capsys.readouterr() == (
        "",
        f"error: {tmp_path}/snapshots/step-000000001: {name}: transformer.wte.weight does not match its checksum in "
        f"the manifest: choose another with --step\n",
    )


def test_a_snapshot_of_another_format_is_a_mistake_for_who_needs_it(tmp_path: Path, capsys: Captured) -> None:
    train(tmp_path, 9)
    train(tmp_path, 10)
    path = tmp_path / "snapshots" / "step-000000010" / "manifest.json"
    path.write_bytes(signed(json.loads(path.read_bytes()) | {"format": 4}))
    for command in ("verify", "digest", "show", "prune"):
        assert snapshots.main([command, str(tmp_path)]) == 64
        out, err = capsys.readouterr()
        assert "the snapshot of step 10 has format 4" in err
        if command != "prune":
            assert snapshots.main([command, str(tmp_path), "--step", "9"]) == 0
        if command == "verify":  # the others all the same
            assert out == f"step 10: of another format, not verified\nstep 9: good, digest {digest(tmp_path, 9)}\n"
    capsys.readouterr()
    assert snapshots.main(["list", str(tmp_path)]) == 0
    _, other, good = capsys.readouterr().out.splitlines()
    assert other.endswith("other format: format 4; this version of mingpt reads 2 and 3")
    assert good.endswith("looks good")
    assert generate.main([str(tmp_path)]) == 64
    assert "use the version that wrote it" in capsys.readouterr().err
    assert path.exists()


def test_a_store_that_does_not_answer_is_told_in_one_line(
    run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: object) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(Store, "read_manifest", down)
    for main, arguments in ((snapshots.main, ["list"]), (generate.main, [])):
        assert main([*arguments, str(run)]) == 70
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: URL={run}/snapshots: nobody answers: try again")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "zxa"], "the text has characters that the model never saw: 'xz'"),
        (["--tokens", "0"], "--tokens 0: at least 1"),
        (["--temperature", "nan"], "--temperature nan: a number, 0 or more"),
        (
            ["--prompt", "", "--temperature", "-1", "--top-k", "0"],
            "3 problems:\n  1. --prompt is empty: give it at least one character\n"
            "  2. --temperature -1.0: a number, 0 or more\n"
            "  3. --top-k 0: at least 1",
        ),
    ],
)
def test_bad_options_of_generate_exit_64(tmp_path: Path, capsys: Captured, arguments: list[str], message: str) -> None:
    train(tmp_path, 1)
    assert generate.main([str(tmp_path), *arguments]) == 64
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_a_snapshot_of_something_else_is_a_mistake(run: Path, capsys: Captured) -> None:
    """Good in itself, but its config has no model."""
    assert generate.main([str(run)]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {run}/snapshots/step-000000030: ")


def test_a_byte_model_takes_any_byte_and_no_lone_surrogate(tmp_path: Path, capsys: Captured) -> None:
    """U+DCFF is what Python makes of a byte FF on the command line."""
    train(tmp_path, 1, kind="byte")
    assert generate.main([str(tmp_path), "--prompt", "\udcff"]) == 0
    assert generate.main([str(tmp_path), "--prompt", "\ud800"]) == 64
    assert capsys.readouterr().err.startswith("error: the text is no Unicode: ")


@pytest.mark.parametrize("command", ["list", "verify", "show", "digest"])
def test_a_reader_that_leaves_early_changes_no_exit_code(run: Path, command: str) -> None:
    """`| head`: what was asked for was done, and nothing is damaged."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "mingpt.snapshots", command, str(run)],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_copy_passes_over_a_snapshot_of_another_format(tmp_path: Path, capsys: Captured) -> None:
    store = Store(str(tmp_path / "snapshots"))
    for step in (1, 2, 3):
        save(store, step)
    path = tmp_path / "snapshots/step-000000003/manifest.json"
    path.write_bytes(signed(json.loads(path.read_bytes()) | {"format": 4}))
    assert snapshots.main(["copy", str(tmp_path), f"{tmp_path}/copy"]) == 64
    out, err = capsys.readouterr()
    assert out.startswith("step 3: of another format, not copied\nstep 2: copied to ")
    assert "step 3 has format 4" in err
    assert Store(f"{tmp_path}/copy/snapshots").steps() == [2, 1]
