"""What elastic.sbatch runs: a launcher on each node, which goes on when nodes are lost, and stand-ins for lost nodes.

    python3 recipes/slurm/elastic.py [Hydra's overrides, options of mingpt.launch]

The job's first node hosts the rendezvous and this program. When Slurm has removed a node from the job, a job of one
node, which runs this program, too, takes its place.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time

from job import ONCE_A_NODE, Job, ask, call, fail, hostnames

LOGS = {"Out": "output", "Err": "error"}  # scontrol's names, and sbatch's options
ENDED = (0, 64, 75)  # a launcher that ends with another code is started again
TELL = 'echo "$SLURM_NODEID $SLURMD_NODENAME $SLURM_CPUS_ON_NODE ${SLURM_GPUS_ON_NODE:-0}"'


def stay(command: list[str]) -> int:
    """On each node but the first: restarts a launcher that has ended, and watches the job."""
    # The signal shall end the launcher, which writes a snapshot, and not this program.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=watch, daemon=True).start()
    while True:
        code = call(*command)
        if code in ENDED:
            return code
        time.sleep(10)


def watch() -> None:
    """Requeues the job when Slurm removes its first node, and ends a stand-in whose job has ended.

    --no-kill covers the first node, too, so the job would go on without its script. (The launchers may need minutes to
    notice that the host is silent.)
    """
    head, job = os.environ["HEAD"], os.environ["HEAD_JOB"]
    while True:
        time.sleep(15)
        state, _, nodes = ask("squeue", "-h", "-j", job, "-o", "%T %N").partition(" ")
        if state not in ("", "RUNNING"):
            if os.environ["SLURM_JOB_ID"] != job:
                call("scancel", os.environ["SLURM_JOB_ID"])
        elif state and head not in hostnames(nodes):
            call("scontrol", "requeue", job)


def launcher(job: Job, slot: str, *options: str) -> list[str]:
    """The command of mingpt.launch on one node. options: of srun.

    A Slurm step of one node has variables for that node only, and a stand-in for a lost node is another job; so the
    options say what all nodes share. --kill-on-bad-exit=0: the srun of a head that was cut off, and is back when the
    job runs elsewhere, would end the step that now has its step's number.
    """
    say = os.environ
    keeper = [sys.executable, os.path.abspath(__file__), "stay"] if slot != "0" else []
    srun = [*ONCE_A_NODE, "--nodes=1", "--ntasks=1", "--kill-on-bad-exit=0", *options]
    shared = [f"--nnodes={say['MIN_NODES']}:{say['MAX_NODES']}", f"--node-rank={slot}"]
    shared += [f"--rdzv-endpoint={say['HEAD']}:{say['PORT']}", f"--rdzv-id=slurm-{say['HEAD_JOB']}"]
    return [*srun, *keeper, *job.python, "-m", "mingpt.launch", *shared, *job.arguments]


def stand_in(job: Job) -> int:
    """Takes the place of a node that another job has lost, if that job still runs."""
    if ask("squeue", "-h", "-j", os.environ["HEAD_JOB"], "-t", "RUNNING", "-o", "%B") != os.environ["HEAD"]:
        return 0
    job.prepare(preflight=False)  # the others are training
    return job.train(launcher(job, os.environ["SLOT"]))


class Elastic:
    """The job on its first node: a launcher here, and one for each other node."""

    def __init__(self, job: Job) -> None:
        self.job, self.head = job, os.environ["SLURMD_NODENAME"]
        os.environ["HEAD_JOB"], os.environ["HEAD"], os.environ["MAX_NODES"] = job.id, self.head, str(job.nodes)
        os.environ.setdefault("MIN_NODES", "1")
        port = 10000 + int(job.id) * 16 % 20000 + 15  # as in mingpt/world/slurm.py, for the last step
        os.environ["PORT"] = str(port)
        # A new secret whenever the job starts: nobody takes part in the rendezvous without it. srun and sbatch pass the
        # environment on; a command line would show the secret to every user of the node.
        os.environ["MINGPT_RDZV_SECRET"] = secrets.token_hex(32)
        self.stand_ins = f"{job.name}+{job.id}"  # the name of those jobs

    def run(self) -> int:
        self.cancel_stand_ins()  # from before this job was requeued
        self.job.prepare()
        # Each node's name, and its CPUs and GPUs in this job. Steps of one node and stand-ins ask for the same.
        nodes = [line.split() for line in ask(*self.job.on_all, "bash", "-c", TELL, limit=660).splitlines()]
        if len(nodes) != self.job.nodes:
            fail(f"srun reached {len(nodes)} of {self.job.nodes} nodes", 70)
        self.read_request()
        for name in ("SLURM_GPUS", "SLURM_GPUS_PER_NODE"):  # srun would take these as options for all nodes together
            os.environ.pop(name, None)
        here = ["0"]
        for slot, name, cpus, gpus in nodes:
            if name == self.head:
                here = [gpus]
            else:
                threading.Thread(target=self.keep, args=(slot, name, cpus, gpus), daemon=True).start()
        try:
            return self.job.finish(self.job.train(launcher(self.job, "0", *place(self.head, *here))))
        finally:
            self.cancel_stand_ins()

    def cancel_stand_ins(self) -> None:
        call("scancel", "--quiet", f"--user={os.environ['SLURM_JOB_USER']}", f"--name={self.stand_ins}")

    def read_request(self) -> None:
        """What the user has asked for, which stand-ins ask for, too."""
        described = ask("scontrol", "show", "job", "-d", self.job.id)
        kinds = set(re.findall(r"GRES=gpu:([^:( ]+:)", described))
        self.kind = kinds.pop() if len(kinds) == 1 else ""  # such as L4:, if all GPUs are of one kind
        logs = re.findall(r"^ *Std(Out|Err)=(.*)", described, re.MULTILINE)
        self.asked, _, constraint = ask("squeue", "-h", "-j", self.job.id, "-o", "%n|%f").partition("|")
        self.options = [f"--{LOGS[name]}={file}" for name, file in logs]
        self.options += [] if constraint in ("", "(null)") else [f"--constraint={constraint}"]
        for option, variable in (("mem", "MEM_PER_NODE"), ("mem-per-cpu", "MEM_PER_CPU")):
            self.options += given(option, f"SLURM_{variable}")
        self.options += [*given("account", "SLURM_JOB_ACCOUNT"), *given("qos", "SLURM_JOB_QOS")]

    def keep(self, slot: str, node: str, cpus: str, gpus: str) -> None:
        """Keeps a launcher running in a slot until the run ends.

        It runs on its node while the node belongs to the job. When Slurm has removed the node, because it is down, a
        job of its own runs the launcher.
        """
        while True:
            if node in hostnames(ask("squeue", "-h", "-j", self.job.id, "-o", "%N")):
                code = call(*launcher(self.job, slot, *place(node, gpus)))
            else:
                told = f"slurm: {node} is no longer in the job; another one waits for it, or for a node like it"
                print(told, flush=True)
                code = self.wait_for(slot, node, cpus, gpus)
            if code in (64, 75):  # not 0: srun also returns 0 when its node is lost
                return
            time.sleep(10)

    def wait_for(self, slot: str, node: str, cpus: str, gpus: str) -> int:
        left = ask("squeue", "-h", "-j", self.job.id, "-o", "%L")
        options = [f"--partition={os.environ['SLURM_JOB_PARTITION']}", f"--cpus-per-task={cpus}", f"--time={left}"]
        options += [] if gpus == "0" else [f"--gpus-per-node={self.kind}{gpus}"]
        options += [f"--nodelist={node}"] if self.asked else []  # if the user named nodes, only this one is free again
        command = ["sbatch", "--wait", "--quiet", "--export=ALL", "--nodes=1", "--no-requeue"]
        command += [f"--job-name={self.stand_ins}", *options, *self.options]
        # sbatch would take this job's variables as options.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        kept |= {"SLOT": slot, **{name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}}
        return subprocess.call([*command, "recipes/slurm/elastic.sbatch", *self.job.arguments], env=kept)


def place(node: str, gpus: str) -> list[str]:
    return [f"--nodelist={node}", *([] if gpus == "0" else [f"--gpus={gpus}"])]


def given(option: str, variable: str) -> list[str]:
    value = os.environ.get(variable)
    return [f"--{option}={value}"] if value else []


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["stay"]:
        return stay(arguments[1:])
    job = Job(arguments, own_run=False)
    if os.environ.get("MINGPT_CONTAINER"):
        fail(
            "MINGPT_CONTAINER: elastic.sbatch talks to Slurm from its steps, and can't run them in a container: use "
            "train.sbatch, or set up the nodes (MINGPT_PYTHON)"
        )
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends stand-ins, too
    return stand_in(job) if os.environ.get("HEAD_JOB") else Elastic(job).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
