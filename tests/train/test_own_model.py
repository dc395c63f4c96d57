"""model._target_ and data._target_: any module on any rows, with the same bits for any number of processes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from config_kit import configured, problems
from examples.classifier import Classifier, rows
from mingpt.data.own import source_of
from mingpt.errors import UserError
from mingpt.model.kinds.own import OwnModel
from mingpt.snapshot.reader import read
from mingpt.train import own_model
from mingpt.train.attempt import attempt
from mingpt.train.factory import build
from mingpt.world.lifetime import Lifetime
from own_kit import CLASSIFIER, OwnRun


def test_the_target_brings_its_section_and_its_arguments_need_no_plus() -> None:
    config = configured(*CLASSIFIER, "model.hidden=7", "++model.dropout=0.5", "data.seed=3", "data.workers=1")
    assert config.model.model_dump() == {
        "kind": "own", "_target_": "examples.classifier.Classifier", "block_size": 1, "hidden": 7, "dropout": 0.5,
    }  # fmt: skip
    assert (config.data.workers, config.data.model_dump()["seed"]) == (1, 3)
    model = build(config, 0)
    assert isinstance(model, Classifier)
    assert model.layers[0].out_features == 7
    # An experiment's keys can be changed, too.
    changed = configured("experiment=classifier", "model.hidden=9", "data.count=99")
    assert changed.model.model_dump()["hidden"] == 9
    assert len(changed.data.open(1, 8).train) == 89


def test_arguments_of_known_names_are_supplied() -> None:
    config = configured("model._target_=own_kit.by_vocabulary", "model.block_size=4")
    model = build(config, vocab_size=5)
    assert isinstance(model, Classifier)
    assert model.layers[0].out_features == 9


def test_weights_are_a_function_of_the_seed() -> None:
    first, again, other = (build(configured(*CLASSIFIER, f"seed={s}"), 0).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layers.0.weight"], other["layers.0.weight"])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "=nothing: name a class or function: package.module.Name"),
        ("a..b", "=a..b: name a class or function: package.module.Name"),
        ("os.path;x.y", "=os.path;x.y: name a class or function: package.module.Name"),
        ("no_such.module.Model", "=no_such.module.Model: there is no module 'no_such': check the spelling, and start"),
        ("own_kit.Liner", "=own_kit.Liner: the module own_kit has no Liner (did you mean own_kit.Linear?)"),
        ("own_kit.NOT_CALLABLE", "=own_kit.NOT_CALLABLE is a int, neither a class nor a function"),
        ("own_kit.Plain", "=own_kit.Plain is no torch.nn.Module: derive the class from it"),
        ("own_kit.NoForward", "=own_kit.NoForward has no forward: give it forward("),
        ("own_kit.fails", "=own_kit.fails takes (hidden): model.hidden is missing"),
    ],
)
def test_a_wrong_path_is_a_mistake_before_anything_starts(target: str, message: str) -> None:
    [problem] = problems(f"model._target_='{target}'")
    assert problem.startswith(f"model._target_{message}")


def test_all_wrong_arguments_are_listed_with_other_problems() -> None:
    assert problems(*CLASSIFIER, "model.hiden=7", "data.cout=9", "seed=-1") == [
        "seed=-1: must be greater than or equal to 0",
        "model._target_=examples.classifier.Classifier takes (n_in, hidden, classes, dropout): model.hiden is no "
        "argument of it (did you mean model.hidden?)",
        "data._target_=examples.classifier.rows takes (micro_size, count, n_in, seed): data.cout is no argument of it "
        "(did you mean data.count?)",
    ]
    assert problems("model.hidden=7") == ["model.hidden is not a key"]
    assert problems("model=gpt2", CLASSIFIER[0]) == [
        "model._target_ is not a key of model.kind=gpt, only of own: leave it out, or choose model.kind=own"
    ]
    assert problems("model=own") == ["model._target_=: name a class or function: package.module.Name"]


def test_a_module_that_cannot_be_imported_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, content, told in (
        ("bad_syntax", "x = 1\ny = (", "SyntaxError: '(' was never closed"),
        ("bad_import", "x = 1\nimport no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("bad_luck", "x = 1\nraise SystemExit(3)", "SystemExit: 3"),
    ):
        (tmp_path / f"{name}.py").write_text(content)
        assert problems(f"model._target_={name}.Model") == [
            f"model._target_={name}.Model: importing {name} failed: {told} ({tmp_path}/{name}.py, line 2)"
        ]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("own_kit.gives_none", "returned a value of type NoneType, not a torch.nn.Module"),
        ("own_kit.fails model.hidden=3", r"failed with \(hidden=3\): ValueError: 3 is odd \(.*own_kit.py, line \d+\)"),
        ("own_kit.quits", r"failed with \(\): SystemExit: 0 \(.*own_kit.py, line \d+\)"),
        (
            "own_kit.Lazy",
            "layer.weight, layer.bias have no shape before the first forward: give the",
        ),
        ("own_kit.Complex", "its state_dict has values that snapshots can't hold: z: use plain tensors"),
        ("torch.nn.Identity", "has no parameter to train"),
        ("own_kit.Expanded", r"shift are views into other memory \(expanded, or with gaps\), which can't be trained"),
        ("own_kit.Gaps", "shift are views into other memory"),
        ("own_kit.Scaled", "loss_scale are names of optimizer state in snapshots: take other names"),
    ],
)
def test_what_gives_no_module_is_a_mistake(target: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^model._target_={target.split()[0]}:? {message}"):
        build(configured(*f"model._target_={target}".split()), 0)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "Unlucky",
            r": forward\(\[2, 10\] float32, \[2\] int64\) failed: KeyError: 'no luck' \(.*own_kit.py, line \d+",
        ),
        ("Quits", r": forward\(.*\) failed: SystemExit: 0 \(.*own_kit.py, line \d+"),
        ("Infinite", r": forward\(.*\) returned the loss inf: it must be finite"),
        ("Uncounted", r": forward\(.*\) returned the count nan: it must be the number of targets"),
        ("OneTensor", r": forward\(.*\) must return \(loss_sum, count\), scalars on its device, and returned"),
        ("Means", r": forward\(.*\) must return \(loss_sum, count\), scalars .* returned \(\[\] cpu, int\)"),
        (
            "Idle",
            ": the loss does not depend on unused.weight, unused.bias: take them out, or name them in train.freeze",
        ),
        ("Sparse", ": shift.weight have sparse gradients, which can't be reduced: set sparse=False"),
        ("Refuses", ": backward after forward.* failed: RuntimeError: x does not have a deterministic .*reduce=fast"),
        ("Normed", ": forward changes the buffers norm.running_mean, .*take a layer without running statistics"),
    ],
)
def test_what_does_not_keep_the_protocol_is_a_mistake(target: str, message: str) -> None:
    config = configured(f"model._target_=own_kit.{target}")
    assert isinstance(config.model, OwnModel)
    model = build(config, 0)
    with pytest.raises(UserError, match=f"^model._target_=own_kit.{target}{message}"):
        own_model.try_out(model, config.model, rows(2).train[[0, 1]])


def test_what_keeps_it_is_left_as_it_was() -> None:
    config = configured("model._target_=own_kit.Idle", "train.freeze=[unused.*]")
    assert isinstance(config.model, OwnModel)
    model = build(config, 0)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    own_model.try_out(model, config.model, rows(2).train[[0, 1]])
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gives_none", " returns a NoneType: return a mingpt.data.source.Source, as source_of does"),
        ("no_rows", ": the training set has no samples"),
        ("uneven", None),
    ],
)
def test_what_gives_no_source_is_a_mistake(target: str, message: str | None) -> None:
    expected = f"^data._target_=own_kit.{target}{message}" if message else "train must be tensors with the same number"
    with pytest.raises(UserError, match=expected):
        configured(f"data._target_=own_kit.{target}").data.open(1, 2)


def test_a_gpt_needs_tokens() -> None:
    with pytest.raises(UserError, match="the data has no tokens, and a GPT needs some"):
        build(configured(CLASSIFIER[1]), 0)


def test_the_identity_of_rows_is_that_of_their_content() -> None:
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    first = source_of((x, y), (x[:3], y[:3]), 2)
    assert first.sha256 == source_of((x.clone(), y), (x[:3], y[:3]), 4).sha256
    assert first.sha256 != source_of((x + 1, y), (x[:3], y[:3]), 2).sha256
    assert [len(first.validation[i][0]) for i in range(len(first.validation))] == [2, 1]
    assert torch.equal(first.train[[4, 0]][0], x[[4, 0]])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> OwnRun:
    run = OwnRun(str(tmp_path_factory.mktemp("alone")), Path(), Path())
    run.finish(1)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_processes_gives_the_same_bits(alone: OwnRun, tmp_path: Path, world: int) -> None:
    run = OwnRun(str(tmp_path), Path(), Path(), ("data.workers=1",) if world == 2 else ())
    run.finish(world)
    assert run.digest() == alone.digest()


@pytest.mark.slow
def test_a_kill_changes_nothing(alone: OwnRun, tmp_path: Path) -> None:
    run = OwnRun(str(tmp_path), Path(), Path())
    started = run.start(2, restarts=3)
    killed: list[int] = []

    def kill(step: int) -> None:
        if step >= 9 and not killed:
            killed.append(started.workers()[1])
            os.kill(killed[0], signal.SIGKILL)

    started.on_step = kill
    assert started.wait() == 0, started.output
    assert "resumed from step 8" in started.output
    assert run.digest() == alone.digest()


@pytest.mark.slow
def test_data_that_end_the_process_have_not_finished_the_run() -> None:
    arguments = [CLASSIFIER[0], "data._target_=own_kit.quits_when_asked_for_its_length"]
    done = subprocess.run(
        [sys.executable, "-m", "mingpt.train", *arguments],
        env={**os.environ, "PYTHONPATH": "tests/kits:."},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 70
    assert done.stderr.endswith("error: SystemExit: 0\n")


def test_an_address_among_the_arguments_is_told_without_its_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    url = "data.url='https://me:hunter2@host/x?X-Signature=s3cret'"
    assert attempt([CLASSIFIER[0], "data._target_=own_kit.cannot_be_had", url], Lifetime()) == 64
    told = capsys.readouterr()
    assert "url='https://***@host/x?***'): OSError: no answer from https://***@host/x?*** (" in told.err
    assert not re.search("hunter2|s3cret", told.out + told.err)


@pytest.mark.slow
def test_a_model_that_ends_the_process_has_not_finished_the_run(tmp_path: Path) -> None:
    run = OwnRun(str(tmp_path), Path(), Path(), ("model._target_=own_kit.QuitsLater",), {"PYTHONPATH": "tests/kits:."})
    started = run.start(1)
    assert started.wait() == 70, started.output
    assert started.output.endswith("error: SystemExit: 0\n")
    assert re.search(r"own_kit\.py.*raise SystemExit\(0\)", started.output, re.DOTALL)


@pytest.mark.slow
def test_what_reads_a_snapshot_does_not_import_what_it_names(alone: OwnRun, tmp_path: Path) -> None:
    manifest = read(alone.store, alone.store.steps()[0]).manifest
    assert manifest.config["model"]["_target_"] == "examples.classifier.Classifier"
    assert manifest.vocabulary == {"kind": "none"}
    assert len(manifest.fingerprint["code"]) == 64
    script = (
        "import sys; from mingpt.commands import generate, snapshots; run, out = sys.argv[1:]\n"
        "codes = [snapshots.main([c, run]) for c in ('list', 'show', 'verify', 'digest')]\n"
        "codes += [snapshots.main(['copy', run, out + '/copy']), snapshots.main(['export', run, out + '/hf'])]\n"
        "codes += [generate.main([run])]\n"
        "assert not [name for name in sys.modules if name.startswith('examples')]; print(codes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, alone.dir, str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines()[-1:] == ["[0, 0, 0, 0, 0, 64, 64]"], done.stderr
    assert done.stderr.count("a snapshot of 'examples.classifier.Classifier', not of mingpt's GPT") == 2
