"""recipes/kubernetes: the manifests against the published schemas, and what their pods run and need."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from mingpt.cli.command import expanded
from tests.kits.paths_kit import ROOT

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


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Each pod's specification, and that of its Job, if it has one; with the claim that is commented out."""
    for thing in objects(optional=True):
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
        assert [volume["name"] for volume in pod["volumes"]] == [mount["name"] for mount in container["volumeMounts"]]
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


def test_each_runs_what_its_variables_say() -> None:
    """A TrainJob has them itself, for the command of its runtime; the others have both in the container."""
    trainers = [thing["spec"]["trainer"] for thing in objects() if thing["kind"] == "TrainJob"]
    containers = [pod["containers"][0] for pod, _ in pods()]
    found = [job for job in (*trainers, *containers) if "args" in job]
    assert [c["command"] for c in containers if "command" in c] == [["mingpt", "launch"]] * 4
    assert len(found) == 4
    from_labels = {v["name"]: v["valueFrom"] for job in found for v in job["env"] if "valueFrom" in v}
    assert from_labels == {
        name: {"fieldRef": {"fieldPath": f"metadata.labels['jobset.sigs.k8s.io/{label}']"}}
        for name, label in (
            ("PET_NNODES", "replicatedjob-replicas"),
            ("PET_NODE_RANK", "job-index"),
            ("PET_MASTER_ADDR", "coordinator"),
        )
    }
    for job in found:
        told = {variable["name"]: variable.get("value", "") for variable in job["env"]}
        words = expanded("launch", job["args"], {**told, "OVERRIDES": "run.name='a b' train.max_steps=5"})
        assert words == ["experiment=mnist", "run.dir='s3://bucket/mnist'", "run.name='a b'", "train.max_steps=5"]
