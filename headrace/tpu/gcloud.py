"""The same by gcloud: what --dry-run prints, word for word what can be typed."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.tpu import bundle, gcp, google_auth as google, install
from headrace.tpu.request import Request

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
    found.append(f"--valid-until-duration={gcp.VALID}s")
    found += ["--internal-ips"] if request.internal else []
    for disk in request.disks:
        found.append(f"--data-disk=source={gcp.disk_source(project, zone, disk)},mode=read-only")
    told = gcp.metadata(project, request, zone, seconds, idle)
    told.pop("startup-script")
    found.append("--labels=" + ",".join(f"{key}={value}" for key, value in gcp.labels(seconds, idle).items()))
    found.append("--metadata=" + ",".join(f"{key}={value}" for key, value in told.items()))
    found.append(f"--metadata-from-file=startup-script={gcp.TIMER}")
    return found


def by_hand(
    project: str,
    request: Request,
    *,
    seconds: float,
    idle: float | None,
    tree: Path,
    recipe: Path | None,
    extras: Sequence[str],
    train: Sequence[str],
) -> Iterator[str]:
    """The lines of a shell that do what a run does, but for starting again. `recipe` is one that is not in
    the tree."""
    zone, name = request.zones[0], request.name
    several = request.slice.slices > 1
    nodes = [f"{name}-{number}" for number in range(request.slice.slices)] if several else [name]
    packed = f"/tmp/{name}-tree.tgz"
    yield written(create(project, request, zone, seconds, idle))
    yield f"until {written(state(project, name, zone))} | grep -qx ACTIVE; do sleep 10; done"
    yield packing(tree, packed)
    unpack = "mkdir -p .headrace/tree && tar xzf .headrace-tree.tgz -C .headrace/tree"
    for node in nodes:
        yield written(scp(project, node, zone, packed, ".headrace-tree.tgz"))
        yield written(ssh(project, node, zone, unpack))
        if recipe is not None:
            yield written(scp(project, node, zone, str(recipe), ".headrace/tree/.recipe.yaml"))
        yield written(ssh(project, node, zone, install.script(tree, extras)))
        for number, disk in enumerate(request.disks, 1):
            yield written(ssh(project, node, zone, install.mounting(disk, number, "ro")))
    trainer = f'cd "$HOME/.headrace/tree" && "$HOME/.headrace/env/bin/python" -m headrace {shlex.join(train)}'
    for node in nodes:  # at once, where there are several
        yield written(ssh(project, node, zone, trainer)) + " &" * several
    if several:
        yield "wait"
    yield written(delete(project, name, zone))


def packing(tree: Path, packed: str) -> str:
    """What git tracks or would, without what looks secret."""
    files = f"git -C {shlex.quote(str(tree))} ls-files -z --cached --others --exclude-standard"
    without = " ".join(f"--exclude={shlex.quote(name)}" for name in bundle.SECRET_BY_HAND)
    place = shlex.quote(str(tree))
    return f"{files} | tar -C {place} --null --ignore-failed-read {without} -T - -czf {packed}"


def state(project: str, name: str, zone: str) -> Command:
    found = ["gcloud", "compute", "tpus", "queued-resources", "describe", name, *where(project, zone)]
    return [*found, "--format=value(state.state)"]


def scp(project: str, name: str, zone: str, file: str, to: str) -> Command:
    found = ["gcloud", "compute", "tpus", "tpu-vm", "scp", file, f"{name}:{to}"]
    return [*found, *where(project, zone), "--worker=all"]


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
