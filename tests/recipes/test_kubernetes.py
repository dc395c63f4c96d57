"""recipes/kubernetes: the manifests against the published schemas; pods' variables in real processes on loopback."""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from mingpt.command import expanded
from node_kit import Node, ask_to_stop, free_port
from paths_kit import ROOT
from run_kit import NewRun, Run

FOLDER = ROOT / "recipes/kubernetes"


SCHEMAS = yaml.safe_load(Path(__file__).with_name("kubernetes.schemas.yaml").read_text())


# Lines that a user may take the "# " of: Kueue's queue, RDMA, a claim and where it is mounted.
OPTIONAL = re.compile(r"^( *)# (labels: |rdma/|- \{)", re.MULTILINE)


def objects(optional: bool = False) -> Iterator[dict[str, Any]]:
    """optional: with the lines that are commented out."""
    for file in sorted(FOLDER.glob("*.yaml")):
        yield from yaml.safe_load_all(OPTIONAL.sub(r"\1\2", file.read_text()) if optional else file.read_text())


def kind_of(thing: Mapping[str, Any]) -> str:
    return f"{thing['apiVersion']} {thing['kind']}"


def core_objects(thing: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The Jobs and Pods that a controller makes of it."""
    spec = thing["spec"].get("template", thing)["spec"]
    for job in spec.get("replicatedJobs", ()):
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["template"]}
    for replica in spec.get("pytorchReplicaSpecs", {}).values():
        pod = {"restartPolicy": replica["restartPolicy"], **replica["template"]["spec"]}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}


def problems(thing: Mapping[str, Any]) -> list[str]:
    """What the schemas say against it."""
    validator = jsonschema.Draft202012Validator(SCHEMAS[kind_of(thing)])
    found = [error.message for error in validator.iter_errors(thing)]
    for core in core_objects(thing):
        try:
            kubernetes_validate.validate(core, "1.31", strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(error.message)
    return found


@pytest.mark.parametrize("optional", [False, True])
def test_each_manifest_is_what_its_schema_allows(optional: bool) -> None:
    things = list(objects(optional))
    assert {kind_of(thing) for thing in things} == SCHEMAS.keys()
    assert [problems(thing) for thing in things] == [[]] * len(things)


def pods(optional: bool = False) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Each pod's specification, and that of its Job, if it has one."""
    for thing in objects(optional):
        for core in core_objects(thing):
            job = core["spec"] if core["kind"] == "Job" else None
            yield (job["template"]["spec"] if job else core["spec"]), job


def test_each_pod_can_store_its_snapshot_and_is_tried_again_unless_the_user_must_act() -> None:
    found = list(pods())
    assert len(found) == 4
    for pod, job in found:
        (container,) = pod["containers"]
        assert pod["terminationGracePeriodSeconds"] > 300  # launch.shutdown_timeout_seconds
        assert container["command"] == ["mingpt", "launch"]  # as the first process: it gets the signal itself
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert container["envFrom"][0]["secretRef"]["name"] == "mingpt"
        # What the "restricted" level of Kubernetes' pod security asks for; the image's user is 1000.
        user = {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
        assert (pod["securityContext"], pod["automountServiceAccountToken"]) == (user, False)
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        if job is None:
            assert pod["restartPolicy"] == "OnFailure"
            continue
        codes = {rule["action"]: rule.get("onExitCodes") for rule in job["podFailurePolicy"]["rules"][:2]}
        of_ours = {"containerName": container["name"], "operator": "In"}
        assert codes == {"FailJob": {**of_ours, "values": [64]}, "Ignore": {**of_ours, "values": [75]}}  # 70 is counted


def test_the_number_of_nodes_stands_in_one_place() -> None:
    twos = {
        file.name: re.findall(r"^ *(.*\b2\b.*)", file.read_text().split("kind:", 1)[1], re.M)
        for file in FOLDER.iterdir()
    }
    assert {name: [line.partition(" #")[0] for line in lines] for name, lines in twos.items()} == {
        "jobset.yaml": ["replicas: 2"],
        "pytorchjob.yaml": [],
        "trainjob.yaml": ["numNodes: 2"],
    }
    (pod,) = (
        job["spec"]["template"]["spec"]
        for thing in objects()
        if thing["kind"] == "JobSet"
        for job in core_objects(thing)
    )
    told = {v["name"]: v["valueFrom"]["fieldRef"]["fieldPath"] for v in pod["containers"][0]["env"] if "valueFrom" in v}
    assert told == {
        "PET_NNODES": "metadata.labels['jobset.sigs.k8s.io/replicatedjob-replicas']",
        "PET_NODE_RANK": "metadata.labels['jobset.sigs.k8s.io/job-index']",
    }
    (job,) = (thing for thing in objects() if thing["kind"] == "PyTorchJob")
    assert [replica["replicas"] for replica in job["spec"]["pytorchReplicaSpecs"].values()] == [1, 1]


def test_what_is_commented_out_is_a_queue_a_volume_and_rdma() -> None:
    things = list(objects(optional=True))
    queues = [thing["kind"] for thing in things if "kueue.x-k8s.io/queue-name" in thing["metadata"].get("labels", {})]
    assert queues == ["JobSet", "PyTorchJob", "TrainJob"]
    claim = {"name": "runs", "persistentVolumeClaim": {"claimName": "mingpt"}}
    for pod, _ in pods(optional=True):
        assert claim in pod["volumes"]
        assert {"name": "runs", "mountPath": "/runs"} in pod["containers"][0]["volumeMounts"]
    assert str(things).count("'rdma/hca_shared_devices_a': 1") == 4


def test_each_runs_what_its_variables_say() -> None:
    """A TrainJob has them itself, for the command of its runtime; the others have both in the container."""
    trainers = [thing["spec"]["trainer"] for thing in objects() if thing["kind"] == "TrainJob"]
    containers = [pod["containers"][0] for pod, _ in pods()]
    found = [job for job in (*trainers, *containers) if "args" in job]
    assert [c["command"] for c in containers if "command" in c] == [["mingpt", "launch"]] * 4
    assert len(found) == 4
    for job in found:
        told = {variable["name"]: variable.get("value", "") for variable in job["env"]}
        words = expanded("launch", job["args"], {**told, "OVERRIDES": "run.name='a b' train.max_steps=5"})
        assert words == ["experiment=mnist", "run.dir='s3://bucket/mnist'", "run.name='a b'", "train.max_steps=5"]


# --- the same variables, in processes on loopback ---


def jobset(rank: int, nodes: int, port: int) -> dict[str, str]:
    """As recipes/kubernetes/jobset.yaml gives them."""
    (thing,) = (thing for thing in objects() if thing["kind"] == "JobSet")
    (pod,) = (job["spec"]["template"]["spec"] for job in core_objects(thing))
    names = {variable["name"] for variable in pod["containers"][0]["env"]} - {"EXPERIMENT", "RUN_DIR", "OVERRIDES"}
    told = {"NNODES": nodes, "NODE_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    assert names == {f"PET_{name}" for name in told}
    return {f"PET_{name}": str(value) for name, value in told.items()}


def trainjob(rank: int, nodes: int, port: int) -> dict[str, str]:
    """As trainer v2.2.1 gives them to a pod that asks for one process."""
    return {**jobset(rank, nodes, port), "PET_NPROC_PER_NODE": "1"}


def pytorchjob(rank: int, nodes: int, port: int) -> dict[str, str]:
    """As training-operator v1.9.0 gives them; older ones leave PET_… out."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(nodes), "RANK": str(rank)}
    return told | {"PYTHONUNBUFFERED": "1"} | (jobset(rank, nodes, port) if rank % 2 else {})


@pytest.mark.slow
@pytest.mark.nightly
def test_a_pod_is_killed_one_is_evicted_and_the_weights_are_those_of_one_process(
    undisturbed: NewRun, tmp_path: Path, text: Path, cache: Path
) -> None:
    run = Run(str(tmp_path / "run"), text, cache)
    arguments = [sys.executable, "-m", "mingpt.launch", *run.command(1)[3:]]
    pods: list[Node] = []
    happened: list[str] = []

    def start(variables: dict[str, str]) -> Node:
        pods.append(Node(arguments, variables, ROOT, on_line))
        return pods[-1]

    def on_line(line: str) -> None:
        if not happened and re.match(r"step \d+: snapshot \w+ in ", line):
            happened.append("killed")
            pods[1].kill()
            start(trainjob(1, 2, port))  # the Job makes a new pod for this index
        elif len(happened) == 1 and len(pods) == 3 and re.match(r"step +1\d/", line):
            happened.append("evicted")
            ask_to_stop(pods[2].process.pid, workers=pods[2].workers())

    port = free_port()
    for rank in (0, 1):
        start(trainjob(rank, 2, port))
    try:
        assert pods[0].wait() == 75, pods[0].output
        assert pods[2].wait() == 75, pods[2].output
        assert happened == ["killed", "evicted"]
        last = [Node(arguments, pytorchjob(rank, 3, port), ROOT) for rank in range(3)]
        pods += last
        assert [pod.wait() for pod in last] == [0, 0, 0], last[0].output
    finally:
        for pod in pods:
            pod.kill()
    assert "3 processes on cpu" in last[0].output
    assert run.digest() == undisturbed().digest()
