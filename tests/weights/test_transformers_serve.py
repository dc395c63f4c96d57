"""Exported runs behind `transformers serve`: OpenAI's client gets the texts that `mingpt generate` writes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import bpe_kit
from mingpt import cli
from mingpt.data.bpe import END_OF_TEXT
from node_kit import free_port, listening, wait_until
from replay_kit import train_here

pytest.importorskip("fastapi", reason="transformers serve needs Python 3.11")
pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # what is exported: test_export_tokens.py, test_weights_export.py
SHORT = ("model=modern-nano", "~model.dropout", "model.n_layer=2", "model.block_size=64", "batch.global_size=16",
         "train.max_steps=100", "schedule.decay_steps=100", "data.val_fraction=0", "data.kind=chat",
         "data.tokens=bpe")  # fmt: skip


def test_a_run_of_conversations_completes_texts_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"prompt": f"{n}?", "answer": f"é{n % 3}"}) for n in range(100)]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    bpe = f"data.tokenizer={bpe_kit.write_gpt2(tmp_path / 'bpe')}"
    run, out = f"{tmp_path}/run", f"{tmp_path}/out"
    train_here(run, *SHORT, bpe, f"data.path={tmp_path}/lines")
    assert cli.run("snapshots", ["export", run, out]) == 0
    capsys.readouterr()
    prompt = f"<|im_start|>user\n9?{END_OF_TEXT}\n<|im_start|>assistant\n"
    assert (
        cli.run("generate", [run, "--prompt", prompt, "--tokens", "12", "--temperature", "0", "--device", "cpu"]) == 0
    )
    text = capsys.readouterr().out.removeprefix(prompt).removesuffix("\n")
    expected, ended, _ = text.partition(END_OF_TEXT)
    assert expected.strip()
    asked: Any = {"model": out, "max_tokens": 12, "temperature": 0}
    port = free_port()
    command = [f"{Path(sys.executable).parent}/transformers", "serve", out, "--device", "cpu", "--port", str(port)]
    server = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"})
    try:
        wait_until(lambda: listening(port) or server.poll() is not None, "the server listens, or has ended")
        client = OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
        chunks = client.completions.create(prompt=prompt, stream=True, **asked)
        assert "".join(c.choices[0].text for c in chunks if c.choices) == expected
        [answer] = client.chat.completions.create(messages=[{"role": "user", "content": "9?"}], **asked).choices
    finally:
        server.terminate()
        server.wait(60)
    assert answer.message.content == expected.strip()
    assert answer.finish_reason == ("stop" if ended else "length")
