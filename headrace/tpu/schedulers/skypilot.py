"""A SkyPilot task: `sky jobs launch FILE` finds a zone for it, and another one after a preemption."""

import shlex
from typing import Any

import yaml

from headrace.errors import ExitCode, UserError
from headrace.tpu import install
from headrace.tpu.schedulers import ExportedJob

SETUP = """\
command -v uv > /dev/null || pip install --user uv
grep -v '^libtpu==' constraints.txt > /tmp/constraints.txt
uv venv --clear --python {python} ~/env
uv pip install --python ~/env/bin/python -c /tmp/constraints.txt -r pyproject.toml {extras}
"""
REMOTE_RECIPE = "/tmp/headrace-recipe.yaml"
RESTARTABLE = [ExitCode.PREEMPTED, ExitCode.HUNG, ExitCode.MACHINE_FAULT, ExitCode.LOST_HOST]
# Hosts of a TPU slice find each other without help, GPU hosts need these variables.
EXPORT_HOSTS = """\
export HEADRACE_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n1):8476"
export HEADRACE_PROCESSES="$SKYPILOT_NUM_NODES" HEADRACE_PROCESS="$SKYPILOT_NODE_RANK"
"""


def render(job: ExportedJob) -> str:
    """The task as YAML. Raises UserError for joined slices, which SkyPilot does not support."""
    is_tpu = job.slice.chip.is_tpu
    if is_tpu and job.slice.slices > 1:
        raise UserError(
            f"--to skypilot: found {job.slice.name}, expected a single slice: SkyPilot does not join slices"
        )
    resources: dict[str, Any] = {"use_spot": job.spot}
    if is_tpu:
        resources["infra"] = "gcp"
        resources["accelerators"] = f"tpu-{job.accelerator}:1"
        resources["accelerator_args"] = {"tpu_vm": True, "runtime_version": job.runtime}
    else:
        resources["accelerators"] = f"{job.slice.chip.name.upper()}:{job.slice.shape[0]}"
    resources["job_recovery"] = {"recover_on_exit_codes": [int(code) for code in RESTARTABLE]}
    args, mounts = list(job.command[1:]), {}
    if job.outside_recipe:  # SkyPilot sends the working tree, but not this file
        mounts["file_mounts"] = {REMOTE_RECIPE: job.outside_recipe}
        args[args.index(job.outside_recipe)] = REMOTE_RECIPE
    command = shlex.join(args)
    extras = " ".join(f"--extra {name}" for name in ("tpu" if is_tpu else "gpu", "gcs", *job.extras))
    task = {
        "name": job.name,
        "workdir": ".",
        "num_nodes": 1 if is_tpu else job.slice.hosts,
        "resources": resources,
        **mounts,
        "setup": SETUP.format(python=install.PYTHON, extras=extras),
        "run": f"{'' if is_tpu else EXPORT_HOSTS}PYTHONPATH=$PWD ~/env/bin/python -m headrace {command}\n",
    }
    return yaml.safe_dump(task, sort_keys=False, width=200)
