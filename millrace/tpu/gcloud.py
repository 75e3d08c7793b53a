"""The same by gcloud: what --dry-run prints, word for word what can be typed."""

import shlex

from millrace.tpu import gcp, google
from millrace.tpu.request import Request

Command = list[str]


def create(project: str, request: Request, zone: str, seconds: float, idle: float | None) -> Command:
    found = ["gcloud", "compute", "tpus", "queued-resources", "create", request.name]
    found += [f"--project={project}", f"--zone={zone}", f"--accelerator-type={request.accelerator}"]
    found += [f"--runtime-version={request.image}", f"--scopes={google.SCOPE}"]
    if request.slice.slices > 1:
        found += [f"--node-count={request.slice.slices}", f"--node-prefix={request.name}"]
    else:
        found.append(f"--node-id={request.name}")
    found += {"spot": ["--spot"], "reserved": ["--reserved"], "on-demand": ["--guaranteed"]}[request.terms]
    found += ["--internal-ips"] if request.internal else []
    for disk in request.disks:
        found.append(f"--data-disk=source={gcp.disk_source(project, zone, disk)},mode=read-only")
    told = gcp.metadata(project, request, zone, seconds, idle)
    told.pop("startup-script")
    found.append("--labels=" + ",".join(f"{key}={value}" for key, value in gcp.labels(seconds).items()))
    found.append("--metadata=" + ",".join(f"{key}={value}" for key, value in told.items()))
    found.append(f"--metadata-from-file=startup-script={gcp.TIMER}")
    return found


def describe(project: str, name: str, zone: str) -> Command:
    return ["gcloud", "compute", "tpus", "queued-resources", "describe", name, *where(project, zone)]


def ssh(project: str, name: str, zone: str, script: str) -> Command:
    found = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", name, *where(project, zone), "--worker=all"]
    return [*found, f"--command={script}"]


def delete(project: str, name: str, zone: str) -> Command:
    found = ["gcloud", "compute", "tpus", "queued-resources", "delete", name]
    return [*found, *where(project, zone), "--force", "--quiet"]


def where(project: str, zone: str) -> Command:
    return [f"--project={project}", f"--zone={zone}"]


def written(command: Command) -> str:
    return shlex.join(command)
