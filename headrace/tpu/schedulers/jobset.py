"""A run as a Kubernetes JobSet for GKE: `kubectl apply -f FILE`; a job a slice, a pod a machine. No
cluster and no image is made here."""

from typing import Any

import yaml

from headrace.errors import UserError
from headrace.tpu.schedulers import Exported

# What GKE calls the machines (cloud.google.com/kubernetes-engine/docs/concepts/tpus, 2026-11).
ACCELERATORS = {
    "v3": "tpu-v3-slice",
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
GRACE = 120  # seconds to save in
RESTARTS = 100
JOB = "slice"
LONGEST = 63  # letters of a pod's name
CHANCE = 5  # of them


def write(run: Exported) -> str:
    if run.slice.chip.name not in ACCELERATORS:
        raise UserError(f"--to jobset: found {run.slice.name}, expected one of {', '.join(ACCELERATORS)}")
    check_name(run)
    alone = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    # A mistake is not tried again: its job fails by the policy of its pods.
    mistake = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    tree = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": run.name, "annotations": alone},
        "spec": {
            "failurePolicy": {"maxRestarts": RESTARTS, "rules": [mistake]},
            "replicatedJobs": [
                {"name": JOB, "replicas": run.slice.slices, "template": {"spec": job(run)}},
            ],
        },
    }
    return yaml.safe_dump(tree, sort_keys=False, width=200)


def check_name(run: Exported) -> None:
    """A pod has the name of its job, two numbers, and letters by chance."""
    pods = run.slice.hosts // run.slice.slices
    longest = LONGEST - len(f"-{JOB}-{run.slice.slices - 1}-{pods - 1}-") - CHANCE
    if len(run.name) > longest:
        raise UserError(
            f"--name: found {run.name} of {len(run.name)} letters, expected {longest} at most with --to "
            "jobset: its pods have numbers after it"
        )


def job(run: Exported) -> dict[str, Any]:
    """A batch/v1 job: a pod for each machine of the slice."""
    hosts, chips = run.slice.hosts // run.slice.slices, run.slice.chips // run.slice.hosts
    selector = {
        "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[run.slice.chip.name],
        "cloud.google.com/gke-tpu-topology": "x".join(map(str, run.slice.shape)),
    }
    if run.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    trainer = {
        "name": "trainer",
        "image": run.image,
        "command": list(run.command),
        "ports": [{"containerPort": 8471}, {"containerPort": 8080}, {"containerPort": 8476}],
        "resources": {"requests": {"google.com/tpu": chips}, "limits": {"google.com/tpu": chips}},
    }
    mistake = {"containerName": "trainer", "operator": "In", "values": [1, 2, 3]}
    return {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": mistake}]},
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": GRACE,
                "nodeSelector": selector,
                "containers": [trainer],
            }
        },
    }
