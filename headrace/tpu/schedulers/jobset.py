"""A Kubernetes JobSet for GKE: `kubectl apply -f FILE`. One job per slice, one pod per machine.

Cluster and image must exist already."""

from typing import Any

import yaml

from headrace.errors import UserError
from headrace.tpu.schedulers import ExportedJob

# GKE's names of the accelerators (cloud.google.com/kubernetes-engine/docs/concepts/tpus, 2026-11).
ACCELERATORS = {
    "v3": "tpu-v3-slice",
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
GRACE_SECONDS = 120  # to save
MAX_RESTARTS = 100
JOB_NAME = "slice"
MAX_POD_NAME = 63  # letters
RANDOM_LETTERS = 5  # that Kubernetes appends to the name of a pod


def render(job: ExportedJob) -> str:
    """The JobSet as YAML. Raises UserError for hardware that GKE does not have, or a name that is too
    long."""
    if job.slice.chip.name not in ACCELERATORS:
        raise UserError(f"--to jobset: found {job.slice.name}, expected one of {', '.join(ACCELERATORS)}")
    check_name_length(job)
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    # A user's mistake is not retried: the pod failure policy below fails the job.
    mistake = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    tree = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, "annotations": exclusive},
        "spec": {
            "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": [mistake]},
            "replicatedJobs": [
                {"name": JOB_NAME, "replicas": job.slice.slices, "template": {"spec": make_job_spec(job)}},
            ],
        },
    }
    return yaml.safe_dump(tree, sort_keys=False, width=200)


def check_name_length(job: ExportedJob) -> None:
    """Raise UserError if the names of the pods would be too long: name of the run, job, two numbers, random
    letters."""
    pods = job.slice.hosts // job.slice.slices
    suffix = f"-{JOB_NAME}-{job.slice.slices - 1}-{pods - 1}-"
    max_length = MAX_POD_NAME - len(suffix) - RANDOM_LETTERS
    if len(job.name) > max_length:
        raise UserError(
            f"--name: found {job.name} of {len(job.name)} letters, expected at most {max_length} with --to "
            "jobset, which adds numbers for its pods"
        )


def make_job_spec(job: ExportedJob) -> dict[str, Any]:
    """The spec of a batch/v1 job with one pod per machine of a slice."""
    hosts, chips = job.slice.hosts // job.slice.slices, job.slice.chips // job.slice.hosts
    selector = {
        "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[job.slice.chip.name],
        "cloud.google.com/gke-tpu-topology": "x".join(map(str, job.slice.shape)),
    }
    if job.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    trainer = {
        "name": "trainer",
        "image": job.image,
        "command": list(job.command),
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
                "terminationGracePeriodSeconds": GRACE_SECONDS,
                "nodeSelector": selector,
                "containers": [trainer],
            }
        },
    }
