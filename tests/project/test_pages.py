"""What a page shows as code to paste is run, or says why it is not.

A block of bash or python in docs/ is run by the test below, unless a comment stands directly above it:

    <!-- not run: WHY -->          it needs a cluster, a GPU, hours, a reader's own run
    <!-- run by tests/… -->        another test reads it from the page
    <!-- signatures: MODULE -->    test_api_page.py compares it with the code
    <!-- file: NAME -->            it is written to NAME, whatever its language

All blocks of a page run in one folder, one after another. Commands that train get fewer steps.
"""

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kits import bpe_kit
from tests.kits.node_kit import free_port
from tests.kits.paths_kit import ROOT, ran

BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
MARK = re.compile(r"not run: \S.*|signatures: \S+|file: \S+|run by tests/\S+?(, .*)?")
COMMAND = re.compile(r"^(mingpt|torchrun|sky|sbatch|kubectl|docker|pip|python) [^<\n]*$", re.M)
PAGES = {page.stem: page for page in sorted((ROOT / "docs").glob("*.md"))}
TEXT = "".join(f"HAMLET: To be, or not to be, that is the question {n:05}. Exeunt.\n\n" for n in range(300))
STEPS = 12  # of whatever trains
# Stand before the blocks of a page: what its reader has from elsewhere.
RUN = "mingpt train experiment=shakespeare_char run.name="
BEFORE = {
    "branches": [f"{RUN}a"],
    "evaluate-generate": [f"{RUN}a"],
    "observe": [f"{RUN}book"],
    "questions": [f"{RUN}a"],
    "serving": [f"{RUN}a"],
    "snapshots": [f"{RUN}a"],
    "time-machine": [
        f"{sys.executable} -m mingpt train experiment=synthetic run.dir=runs/three train.max_steps=240"
        " train.log_every=1 snapshot.every_steps=100 snapshot.asynchronous=false snapshot.hot_every_steps=0"
    ],
}
# What this package does not do, or does with the network, is left out; what trains gets STEPS steps and many snapshots.
PROGRAMS = {
    "pip": "exit 0",
    "mingpt": f"""
case $1 in
    fetch) exit 0 ;;
    train|launch) case "$*" in *--cfg*|*--help*|*--json-schema*) ;; *) set -- "$@" train.max_steps={STEPS} \
        snapshot.every_steps=4 snapshot.keep=9 world.device=cpu ;; esac ;;
esac
exec {sys.executable} -m mingpt "$@"
""",
    "python": f'exec {sys.executable} "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@" train.max_steps={STEPS} world.device=cpu',
}


@dataclass
class Block:
    mark: str
    language: str
    code: str

    @property
    def is_run(self) -> bool:
        return self.language in ("bash", "python") and not self.mark.startswith(
            ("not run", "run by", "signatures", "file")
        )


def blocks(page: Path) -> list[Block]:
    return [Block(m["mark"] or "", m["language"], m["code"]) for m in BLOCK.finditer(page.read_text())]


@pytest.mark.parametrize("page", PAGES.values(), ids=lambda page: page.stem)
def test_what_one_may_paste_is_run_or_says_why_not(page: Path) -> None:
    text = page.read_text()
    assert len(blocks(page)) * 2 == len(re.findall(r"^\s*```", text, re.M))  # none that the pattern does not see
    for block in blocks(page):
        if block.language in ("bash", "python", "yaml"):
            assert not block.mark or MARK.fullmatch(block.mark), block.mark
            if named := re.match(r"run by (tests/[\w/]+\.py)", block.mark):
                assert page.stem in (ROOT / named[1]).read_text(), block.mark
        else:  # it shows an output, and names no command but behind a prompt
            assert COMMAND.findall(block.code) == []


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if any(b.is_run for b in blocks(page))])
def test_the_commands_of_a_page_work_as_they_stand_there(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    for path in (".venv/bin/activate", "data/shakespeare.txt", "book.txt", *(f"corpus/{n}.txt" for n in range(9))):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("" if path.endswith("activate") else f"{path}\n{TEXT}")
    for path in ("any.file", "other.txt", "prompts.txt", "text.txt"):
        (folder / path).write_text(TEXT[:2000] if path != "prompts.txt" else "HAMLET\nTo be\n")
    (folder / "chat.jsonl").write_text('{"prompt": "What is a GPT?", "answer": "A model."}\n' * 40)
    bpe_kit.write_gpt2(folder / "data/gpt2")
    for path in ("examples", "recipes", "benchmarks"):
        shutil.copytree(ROOT / path, folder / path)
    bin = tmp_path / "bin"
    bin.mkdir()
    for program, text in PROGRAMS.items():
        (bin / program).write_text(f"#!/bin/bash\n{text}\n")
        (bin / program).chmod(0o755)

    script = [*BEFORE.get(name.removeprefix("workloads-"), [])]
    for number, block in enumerate(blocks(PAGES[name])):
        if block.mark.startswith("file: "):
            file = folder / block.mark.removeprefix("file: ")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.code)
        elif block.is_run and block.language == "python":
            (folder / f"block{number}.py").write_text(block.code)
            script.append(f"python block{number}.py")
        elif block.is_run:
            script.append(block.code)
    # A run of few steps has snapshots of few steps.
    commands = "\n".join(script).replace("@300", "@8").replace("8000", str(free_port()))
    env = {
        "PATH": f"{bin}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = ran(["bash", "-euo", "pipefail", "-c", f"exec 2>&1\n{commands}"], cwd=folder, env=env)
    assert done.returncode == 0, done.stdout
    if name == "walkthrough":
        (served,) = re.findall(r"^\{.*\"text_completion\".*?\}\}", done.stdout, re.M)
        assert "HAMLET" + json.loads(served)["choices"][0]["text"] in done.stdout.partition(served)[2]
