"""The gcloud commands that do the same as `headrace tpu run`, for --dry-run. They can be pasted into a
shell."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.tpu import bundle, gcp, google_auth, install
from headrace.tpu.request import Request


def make_create_args(
    project: str, request: Request, zone: str, time_limit: float, idle_limit: float | None
) -> list[str]:
    """Arguments of the command that requests a slice, with its timer."""
    args = ["gcloud", "compute", "tpus", "queued-resources", "create", request.name]
    args += [*make_location_args(project, zone), f"--accelerator-type={request.accelerator}"]
    args += [f"--runtime-version={request.image}", f"--scopes={google_auth.SCOPE}"]
    if request.slice.slices > 1:
        args += [f"--node-count={request.slice.slices}", f"--node-prefix={request.name}"]
    else:
        args.append(f"--node-id={request.name}")
    args += {"spot": ["--spot"], "reserved": ["--reserved"], "on-demand": ["--guaranteed"]}[request.terms]
    args.append(f"--valid-until-duration={gcp.REQUEST_VALIDITY}s")
    args += ["--internal-ips"] if request.internal_ips else []
    for disk in request.disks:
        args.append(f"--data-disk=source={gcp.disk_path(project, zone, disk)},mode=read-only")
    metadata = gcp.make_metadata(project, request, zone, time_limit, idle_limit)
    metadata.pop("startup-script")
    labels = gcp.make_labels(time_limit, idle_limit)
    args.append("--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()))
    args.append("--metadata=" + ",".join(f"{key}={value}" for key, value in metadata.items()))
    args.append(f"--metadata-from-file=startup-script={gcp.TIMER_SCRIPT}")
    return args


def make_shell_lines(
    project: str,
    request: Request,
    *,
    time_limit: float,
    idle_limit: float | None,
    tree: Path,
    recipe: Path | None,
    extras: Sequence[str],
    train_args: Sequence[str],
) -> Iterator[str]:
    """The lines of a shell script that does what `headrace tpu run` does, but for restarts.

    `recipe` is a file outside the tree, or None. `train_args` are the arguments of `headrace`."""
    zone, name = request.zones[0], request.name
    is_joined = request.slice.slices > 1
    nodes = [f"{name}-{number}" for number in range(request.slice.slices)] if is_joined else [name]
    archive = f"/tmp/{name}-tree.tgz"
    yield shlex.join(make_create_args(project, request, zone, time_limit, idle_limit))
    state = shlex.join(make_describe_args(project, name, zone))
    yield f"until {state} | grep -qx ACTIVE; do sleep 10; done"
    yield make_pack_command(tree, archive)
    unpack = "mkdir -p .headrace/tree && tar xzf .headrace-tree.tgz -C .headrace/tree"
    for node in nodes:
        yield shlex.join(make_scp_args(project, node, zone, archive, ".headrace-tree.tgz"))
        yield shlex.join(make_ssh_args(project, node, zone, unpack))
        if recipe is not None:
            yield shlex.join(make_scp_args(project, node, zone, str(recipe), ".headrace/tree/.recipe.yaml"))
        yield shlex.join(make_ssh_args(project, node, zone, install.make_install_script(tree, extras)))
        for number, disk in enumerate(request.disks, 1):
            yield shlex.join(
                make_ssh_args(project, node, zone, install.make_mount_script(disk, number, "ro"))
            )
    python = '"$HOME/.headrace/env/bin/python"'
    trainer = f'cd "$HOME/.headrace/tree" && {python} -m headrace {shlex.join(train_args)}'
    for node in nodes:  # at the same time, if there are several
        yield shlex.join(make_ssh_args(project, node, zone, trainer)) + " &" * is_joined
    if is_joined:
        yield "wait"
    yield shlex.join(make_delete_args(project, name, zone))


def make_pack_command(tree: Path, archive: str) -> str:
    """Shell command that packs the files that git tracks or would track, but for probable secrets."""
    root = shlex.quote(str(tree))
    files = f"git -C {root} ls-files -z --cached --others --exclude-standard"
    exclude = " ".join(f"--exclude={shlex.quote(name)}" for name in bundle.SECRET_TAR_PATTERNS)
    return f"{files} | tar -C {root} --null --ignore-failed-read {exclude} -T - -czf {archive}"


def make_describe_args(project: str, name: str, zone: str) -> list[str]:
    """Arguments of the command that prints the state of a slice."""
    args = ["gcloud", "compute", "tpus", "queued-resources", "describe", name]
    return [*args, *make_location_args(project, zone), "--format=value(state.state)"]


def make_scp_args(project: str, node: str, zone: str, source: str, target: str) -> list[str]:
    """Arguments of the command that copies a local file to all workers of a node."""
    args = ["gcloud", "compute", "tpus", "tpu-vm", "scp", source, f"{node}:{target}"]
    return [*args, *make_location_args(project, zone), "--worker=all"]


def make_ssh_args(project: str, node: str, zone: str, script: str) -> list[str]:
    """Arguments of the command that runs a script on all workers of a node."""
    args = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", node, *make_location_args(project, zone)]
    return [*args, "--worker=all", f"--command={script}"]


def make_delete_args(project: str, name: str, zone: str) -> list[str]:
    """Arguments of the command that deletes a slice by hand."""
    args = ["gcloud", "compute", "tpus", "queued-resources", "delete", name]
    return [*args, *make_location_args(project, zone), "--force", "--quiet"]


def make_location_args(project: str, zone: str) -> list[str]:
    """The options that name project and zone."""
    return [f"--project={project}", f"--zone={zone}"]
