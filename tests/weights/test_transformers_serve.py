"""Exported runs behind `transformers serve`: OpenAI's client gets the texts that `mingpt generate` writes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

import bpe_kit
from mingpt.commands import generate, snapshots
from mingpt.data.bpe import END_OF_TEXT
from node_kit import free_port, listening, wait_until

pytest.importorskip("fastapi", reason="transformers serve needs Python 3.11")
pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # what is exported: test_export_tokens.py, test_weights_export.py
GREEDY = ("--temperature", "0", "--device", "cpu")
STEP = 100
SHORT = ("model.n_layer=2", "model.block_size=64", "batch.global_size=16", "batch.micro_size=16", "optimizer.lr=0.01",
         f"train.max_steps={STEP + 1}", "train.eval_every=0", f"snapshot.every_steps={STEP}", "schedule.warmup_steps=4",
         f"schedule.decay_steps={STEP}", "data.val_fraction=0", "world.device=cpu", "track=[]")  # fmt: skip
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def exported(folder: Path, lines: list[str], *overrides: str) -> Path:
    """The folder that is made of a run on these lines, of its snapshot before the last."""
    (folder / "lines").write_text("\n".join(lines) + "\n")
    places = (f"run.dir={folder}/run", f"data.path={folder}/lines", f"data.cache_dir={folder}/cache")
    subprocess.run([sys.executable, "-m", "mingpt.train", *overrides, *SHORT, *places], check=True, timeout=600)
    assert snapshots.main(["export", f"{folder}/run@{STEP}", f"{folder}/out"]) == 0
    return folder / "out"


@contextmanager
def served(model: Path) -> Iterator[OpenAI]:
    port = free_port()
    command = [f"{Path(sys.executable).parent}/transformers", "serve", str(model), "--device", "cpu"]
    server = subprocess.Popen([*command, "--port", str(port)], env={**os.environ, **OFFLINE})
    try:
        wait_until(lambda: listening(port) or server.poll() is not None, "the server listens, or has ended")
        yield OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
    finally:
        server.terminate()
        server.wait(60)


def generated(run: Path, prompt: str, tokens: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What follows the prompt."""
    capsys.readouterr()
    assert generate.main([f"{run}", "--step", str(STEP), "--prompt", prompt, "--tokens", str(tokens), *GREEDY]) == 0
    out = capsys.readouterr().out.removesuffix("\n")
    assert out.startswith(prompt)
    return out.removeprefix(prompt)


def test_a_run_of_characters_completes_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = exported(tmp_path, ["the king in woe, é!", "long live the queen"] * 40, "model=gpt-nano")
    expected = generated(tmp_path / "run", "the ki", 40, capsys)
    assert expected.strip()
    with served(out) as client:
        ask = {"model": str(out), "prompt": "the ki", "max_tokens": 40, "temperature": 0}
        answer = client.completions.create(**ask)  # type: ignore[call-overload]
        assert answer.choices[0].text == expected
        assert answer.usage.prompt_tokens == 6
        chunks = client.completions.create(**ask, stream=True)  # type: ignore[call-overload]
        assert "".join(c.choices[0].text for c in chunks if c.choices) == expected


def test_a_run_of_conversations_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"prompt": f"{n}?", "answer": f"é{n % 3}"}) for n in range(100)]
    bpe = f"data.tokenizer={bpe_kit.write_gpt2(tmp_path / 'bpe')}"
    out = exported(tmp_path, lines, "data.kind=chat", "data.tokens=bpe", bpe, "model=modern-nano")
    expected, ended, _ = generated(tmp_path / "run", "User: 9?\nAssistant:", 12, capsys).partition(END_OF_TEXT)
    assert expected.strip()
    with served(out) as client:
        answer = client.chat.completions.create(
            model=str(out),
            messages=[{"role": "user", "content": "9?"}],
            max_tokens=12,
            temperature=0,
        )
        assert answer.choices[0].message.content == expected.strip()
        assert answer.choices[0].finish_reason == ("stop" if ended else "length")
