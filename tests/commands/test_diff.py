"""`mingpt diff`: a planted difference of each kind is named, and nothing else is."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from branch_kit import train
from mingpt.commands.diff import diff_command
from mingpt.commands.fork import fork_command
from mingpt.errors import USER_ERROR
from mingpt.report.parting import measured
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from report_kit import Made
from run_kit import Run
from snapshot_kit import save

Captured = pytest.CaptureFixture[str]


def diff(capsys: Captured, *arguments: str) -> dict[str, object]:
    capsys.readouterr()
    assert diff_command([*arguments, "--json"]) == 0
    told: dict[str, object] = json.loads(capsys.readouterr().out)
    return told


def unequal(told: dict[str, object]) -> set[str]:
    """Which parts of the answer say that something differs."""
    data = told["data"]
    assert isinstance(data, list)
    found = {k for k in ("config", "code", "numerics", "step", "snapshot") if told[k]}
    return found | ({"data"} if data[0] != data[1] else set())


def test_a_run_is_equal_to_itself(trained: Path, capsys: Captured) -> None:
    assert diff_command([str(trained), str(trained), "--exit-code"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "config: what affects the result is equal",
        f"data: the same (sha256 {read(Store(f'{trained}/snapshots'), 4).manifest.fingerprint['data'][:16]})",
        "code: the same",
        "machine and kernels: the same",
        "steps: 12 are in both traces, all with the same bits of loss and gradient norm",
        "snapshots: 3 in both, all equal, the last of step 12",
    ]


def test_one_changed_key_is_named_with_the_step_that_shows_it(
    trained: Path, tmp_path: Path, text: Path, cache: Path, capsys: Captured
) -> None:
    train(tmp_path / "b", text, cache, "optimizer.weight_decay=0.2", "train.log_every=2")
    told = diff(capsys, str(trained), str(tmp_path / "b"))
    assert unequal(told) == {"config", "step", "snapshot"}
    assert told["config"] == {"optimizer.weight_decay": [0.1, 0.2]}
    assert told["others"] == {"train.log_every": [1, 2]}
    assert (told["step"], told["equal"], told["snapshot"]) == (2, None, [4, 4])  # the first update differs
    assert diff_command([str(trained), str(tmp_path / "b"), "--exit-code"]) == 1
    assert "  optimizer.weight_decay: 0.1 -> 0.2\n" in capsys.readouterr().out


def test_one_byte_of_the_data_is_named(
    trained: Path, tmp_path: Path, text: Path, cache: Path, capsys: Captured
) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("king", "kong", 1))
    train(tmp_path / "b", other, cache)
    told = diff(capsys, str(trained), str(tmp_path / "b"))
    assert {"data"} <= unequal(told) <= {"data", "step", "snapshot"}
    assert told["others"] == {"data.path": [str(text), str(other)]}


@pytest.mark.slow
def test_one_kernel_flag_is_named(trained: Path, tmp_path: Path, text: Path, cache: Path, capsys: Captured) -> None:
    """A flag that no key has: the environment makes torch take the kernels of an older processor."""
    b = Run(f"{tmp_path}/b", text, cache, env={"ATEN_CPU_CAPABILITY": "default"})
    b.finish(1, "train.max_steps=12", "run.name=run")
    told = diff(capsys, str(trained), b.dir)
    assert "numerics" in unequal(told) <= {"numerics", "step", "snapshot"}
    assert any(line.startswith("device: ") and line.endswith("-> cpu DEFAULT") for line in told["numerics"])  # type: ignore[attr-defined]


def test_one_flipped_bit_of_a_weight_is_named(trained: Path, tmp_path: Path, capsys: Captured) -> None:
    b = tmp_path / "b"
    shutil.copytree(trained, b)
    store = Store(f"{b}/snapshots")
    loaded = read(store, 8)
    name = "transformer.h.1.mlp.c_fc.weight"
    loaded.state["model"][name].view(torch.int32)[3, 5] ^= 4
    store.delete(8)
    provenance = {k: getattr(loaded.manifest, k) for k in ("run", "vocabulary", "config", "fingerprint", "history")}
    save(store, 8, loaded.state, keep=99, provenance=provenance)
    told = diff(capsys, str(trained), str(b))
    assert unequal(told) == {"snapshot"}
    assert (told["equal"], told["snapshot"], told["tensors"]) == (4, [8, 8], [1, 112])
    tensor = told["tensor"]
    assert isinstance(tensor, dict)
    assert (tensor["name"], tensor["differ"], tensor["largest"], tensor["at"][0]) == (name, 1, 4, [3, 5])
    diff_command([str(trained), str(b)])
    out = capsys.readouterr().out
    assert f"  {name} (F32): 1 of 2,304 values differ, by at most 4 units in the last place: at [3, 5] " in out
    assert "the other 111 tensors are equal" in out


def test_a_fork_is_known_as_one(trained: Path, tmp_path: Path, capsys: Captured) -> None:
    assert fork_command(["--trust", f"{trained}@8", str(tmp_path / "b"), "seed=2"]) == 0
    assert diff_command([str(trained), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "B was forked from the other after step 8\nconfig: 1 that affect the result differ\n  seed: 1 -> 2\n" in out
    assert "snapshots: 1 in both, all equal, the last of step 8" in out


def test_two_attempts_of_one_run(tmp_path: Path, capsys: Captured) -> None:
    """A sick machine: the second attempt computed step 11 again, with other bits."""
    made = Made(tmp_path).attempt(1, 0, 12).attempt(2, 10, 20, parent=1, losses={11: 7.0}, device="sick")
    made.snapshot(20)
    told = diff(capsys, str(tmp_path), "--attempts", "1", "2")
    assert (told["steps"], told["step"]) == (2, 11)
    assert told["numerics"] == []  # attempt 2's are those of its snapshot, which the kit does not know
    assert diff_command([str(tmp_path), "--attempts", "1", "3"]) == USER_ERROR
    assert "attempt 3: there is none; choose two of 1, 2" in capsys.readouterr().err


def test_snapshots_of_two_steps_are_compared_only_where_both_are_named(
    trained: Path, tmp_path: Path, capsys: Captured
) -> None:
    for name, step in (("a", 8), ("b", 12)):
        shutil.copytree(trained, tmp_path / name)
        for other in {4, 8, 12} - {step}:
            shutil.rmtree(tmp_path / f"{name}/snapshots/step-{other:09d}")
    told = diff(capsys, f"{tmp_path}/a", f"{tmp_path}/b")
    assert (told["common"], told["snapshot"], told["differs"]) == (0, None, False)
    assert diff(capsys, f"{tmp_path}/a@8", f"{tmp_path}/b@12")["snapshot"] == [8, 12]


@pytest.mark.parametrize(
    "arguments",
    [["{run}"], ["{run}", "{run}", "--attempts", "1", "2"], ["{run}", "{run}/nothing"], ["{run}@9", "{run}"]],
)
def test_mistakes(arguments: list[str], trained: Path, capsys: Captured) -> None:
    assert diff_command([a.format(run=trained) for a in arguments]) == USER_ERROR
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("dtype", "a", "b", "differ", "largest"),
    [
        (torch.float32, [1.0, 2.0], [1.0, 2.0000002384185791], 1, 1),
        (torch.float32, [0.0, 1.0], [-0.0, 1.0], 1, 0),
        (torch.float32, [1e-45], [-1e-45], 1, 2),
        (torch.bfloat16, [1.0], [1.0078125], 1, 1),
        (torch.float16, [1.0], [-1.0], 1, 2 * 0x3C00),
        (torch.float64, [-1.7976931348623157e308], [1.7976931348623157e308], 1, 2 * 0x7FEFFFFFFFFFFFFF),
        (torch.int64, [-(2**63)], [2**63 - 1], 1, 2**64 - 1),
        (torch.float32, [float("nan"), 1.0], [1.0, 1.5], 2, 2**22),
        (torch.float32, [float("nan")], [1.0], 1, None),
        (torch.bool, [True], [False], 1, 1),
    ],
)
def test_units_in_the_last_place(
    dtype: torch.dtype, a: list[float], b: list[float], differ: int, largest: int | None
) -> None:
    found = measured("w", "", torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype))
    assert (found.differ, found.largest) == (differ, largest)
    assert replace(found, at=None) == replace(
        measured("w", "", torch.tensor(b, dtype=dtype), torch.tensor(a, dtype=dtype)), at=None
    )
