"""Hydra's launcher `skypilot`: each job of a multirun is a managed job of SkyPilot's, by one `sky jobs launch`.

It submits and does not wait: the same command again submits what has neither finished nor is going on. Hydra looks for
plugins in this package, whose parts may come from several projects (docs/sweeps.md).
"""

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import MISSING, DictConfig

SECONDS = 1800.0  # for one call of sky: the first launch of a job also starts the jobs controller, a machine of its own
# Without --all, the answer ends after 50 jobs. It may begin with text: that the API server has been started.
QUEUE = ("sky", "jobs", "queue", "--skip-finished", "--all", "-o", "json")


@dataclass
class SkyPilotConf:
    """bucket: the folder of all runs, s3://… or gs://…. args: more of `sky jobs launch`, such as `--gpus L4:1`."""

    _target_: str = "hydra_plugins.mingpt_skypilot.SkyPilotLauncher"
    bucket: str = MISSING
    recipe: str = "recipes/train-spot.yaml"
    args: str = ""


ConfigStore.instance().store(group="hydra/launcher", name="skypilot", node=SkyPilotConf, provider="mingpt")


class SkyPilotLauncher(Launcher):
    def __init__(self, bucket: str, recipe: str, args: str) -> None:
        self.bucket, self.recipe, self.more = bucket.rstrip("/"), recipe, shlex.split(args)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from mingpt.cli.console import say
        from mingpt.errors import UserError

        configs = [self.loader.load_sweep_config(self.config, list(overrides)) for overrides in job_overrides]
        names = [str(config.hydra.sweep.subdir) for config in configs]  # what multirun names a run on any launcher
        problems = [p for name, o in zip(names, job_overrides, strict=True) for p in self._problems(name, o)]
        if problems:
            raise UserError(*dict.fromkeys(problems))
        going_on = _call(QUEUE)
        for name, config, overrides in zip(names, configs, job_overrides, strict=True):
            job = f"{self.bucket.rpartition('/')[2]}-{name}"
            if _has_finished(f"{self.bucket}/{name}", int(config.train.max_steps)):
                state = "has finished"
            elif f'"{job}"' in going_on:
                state = "is going on"
            else:
                _call(self._command(job, name, overrides))
                state = "submitted"
            say(f"{job}: {state}")
        return [JobReturn(overrides=o, status=JobStatus.COMPLETED) for o in job_overrides]

    def _problems(self, name: str, overrides: Sequence[str]) -> list[str]:
        """What SkyPilot's names and the recipe's variables can't carry."""
        job, rest = f"{self.bucket.rpartition('/')[2]}-{name}", [o for o in overrides if not _is_experiment(o)]
        problems = []
        if "://" not in self.bucket:
            problems.append(f"hydra.launcher.bucket={self.bucket}: give a bucket's folder, s3://… or gs://…")
        if any(source.provider == "command-line" for source in self.config.hydra.runtime.config_sources):
            problems.append("--config-dir: the machines do not have that folder: leave it out")
        if len(rest) == len(overrides):
            problems.append(f"experiment=… is missing: {self.recipe} has one of its own without it")
        cure = "divides OVERRIDES at spaces: put quotes around the value"
        problems += [f"{o!r}: {self.recipe} {cure}" for o in _divided(rest)]
        if not re.fullmatch(r"[A-Za-z].*[A-Za-z0-9]", job):
            problems.append(f"{job}: SkyPilot's names begin with a letter, and end with a letter or a digit")
        return problems

    def _command(self, job: str, name: str, overrides: Sequence[str]) -> list[str]:
        (*_, experiment) = (o.partition("=")[2] for o in overrides if _is_experiment(o))
        rest = [o for o in overrides if not _is_experiment(o)]
        values = {"RUN_DIR": self.bucket, "EXPERIMENT": experiment}
        values["OVERRIDES"] = " ".join([*rest, f"run.name={name}", f"run.dir={self.bucket}/{name}"])
        named = [word for key, value in values.items() for word in ("--env", f"{key}={value}")]
        return ["sky", "jobs", "launch", "-y", "-d", "-n", job, *self.more, *named, self.recipe]


def _divided(overrides: Sequence[str]) -> list[str]:
    """The overrides that would not be one word of OVERRIDES."""
    from mingpt.cli.command import WORD

    return [o for o in overrides if WORD.findall(o) != [o]]


def _is_experiment(override: str) -> bool:
    return override.startswith(("experiment=", "+experiment="))


def _has_finished(run_dir: str, max_steps: int) -> bool:
    """Whether the run has a snapshot of its last step, which each finished run has."""
    from mingpt.snapshot.store import Store

    return max(Store(f"{run_dir}/snapshots").steps(), default=0) >= max_steps


def _call(command: Sequence[str]) -> str:
    from mingpt.errors import TransientError, UserError

    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not there: run this where SkyPilot is installed") from None
    except subprocess.TimeoutExpired:
        late = f"{command[0]} has not answered within {SECONDS:.0f} s: look what is in the queue, then try again"
        raise TransientError(late) from None
    if ended.returncode:
        raise UserError(f"{shlex.join(command[:3])} failed ({ended.returncode}): {ended.stderr.strip()}")
    return ended.stdout
