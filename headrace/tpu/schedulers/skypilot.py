"""A run as a SkyPilot task: `sky jobs launch FILE`, which finds a zone, and another after a preemption."""

import shlex
from typing import Any

import yaml

from headrace.errors import UserError
from headrace.runtime.supervisor import PREEMPTED
from headrace.tpu import install
from headrace.tpu.schedulers import Exported

SETUP = """\
command -v uv > /dev/null || pip install --user uv
grep -v '^libtpu==' constraints.txt > /tmp/constraints.txt
uv venv --clear --python {python} ~/env
uv pip install --python ~/env/bin/python -c /tmp/constraints.txt -r pyproject.toml {extras}
"""
OUTSIDE = "/tmp/headrace-recipe.yaml"
# Hosts of a TPU slice find each other; those of GPUs are told.
HOSTS = """\
export HEADRACE_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n1):8476"
export HEADRACE_PROCESSES="$SKYPILOT_NUM_NODES" HEADRACE_PROCESS="$SKYPILOT_NODE_RANK"
"""


def write(run: Exported) -> str:
    is_tpu = run.slice.chip.is_tpu
    if is_tpu and run.slice.slices > 1:
        raise UserError(f"--to skypilot: found {run.slice.name}, expected one slice: it joins none")
    resources: dict[str, Any] = {"use_spot": run.spot}
    if is_tpu:
        resources["infra"] = "gcp"
        resources["accelerators"] = f"tpu-{run.accelerator}:1"
        resources["accelerator_args"] = {"tpu_vm": True, "runtime_version": run.runtime}
    else:
        resources["accelerators"] = f"{run.slice.chip.name.upper()}:{run.slice.shape[0]}"
    resources["job_recovery"] = {"recover_on_exit_codes": [PREEMPTED, 76, 77, 78]}
    words, mounts = list(run.command[1:]), {}
    if run.outside:  # the tree goes there by itself
        mounts["file_mounts"] = {OUTSIDE: run.outside}
        words[words.index(run.outside)] = OUTSIDE
    command = shlex.join(words)
    extras = " ".join(f"--extra {name}" for name in ("tpu" if is_tpu else "gpu", "gcs", *run.extras))
    task = {
        "name": run.name,
        "workdir": ".",
        "num_nodes": 1 if is_tpu else run.slice.hosts,
        "resources": resources,
        **mounts,
        "setup": SETUP.format(python=install.PYTHON, extras=extras),
        "run": f"{'' if is_tpu else HOSTS}PYTHONPATH=$PWD ~/env/bin/python -m headrace {command}\n",
    }
    return yaml.safe_dump(task, sort_keys=False, width=200)
