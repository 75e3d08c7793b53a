"""A run as a Slurm script: `sbatch FILE`, a task for each machine, put back into the queue when preempted."""

import shlex

from headrace.runtime.supervisor import PREEMPTED
from headrace.tpu.schedulers import Exported

TEXT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{chips}#SBATCH --time={hours}:{minutes:02}:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
#SBATCH --signal=TERM@120
# Training saves within the 120 seconds before the end and exits with {again}: put back, it goes on.
set -uo pipefail
cd "${{SLURM_SUBMIT_DIR:?}}"
. .venv/bin/activate
srun {command}
code=$?
if [ "$code" -eq {again} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def write(run: Exported) -> str:
    hours, minutes = divmod(max(1, round(run.hours * 60)), 60)
    return TEXT.format(
        name=run.name,
        nodes=run.slice.hosts,
        chips=chips(run),
        hours=hours,
        minutes=minutes,
        again=PREEMPTED,
        command=shlex.join(run.command),
    )


def chips(run: Exported) -> str:
    """Slurm knows GPUs by itself, and TPUs by what its gres.conf calls them."""
    if run.slice.chip.is_tpu:
        return f"#SBATCH --gres=tpu:{run.slice.chips // run.slice.hosts}\n"
    return f"#SBATCH --gpus-per-node={run.slice.shape[0]}\n"
