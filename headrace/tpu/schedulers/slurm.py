"""A Slurm script: `sbatch FILE`. One task per machine; a preempted job is put back into the queue."""

import shlex

from headrace.errors import ExitCode
from headrace.tpu.schedulers import ExportedJob

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{resources}#SBATCH --time={hours}:{minutes:02}:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
#SBATCH --signal=TERM@120
# Training saves in the 120 seconds before the end and exits with {preempted}: requeued, it resumes.
set -uo pipefail
cd "${{SLURM_SUBMIT_DIR:?}}"
. .venv/bin/activate
srun {command}
code=$?
if [ "$code" -eq {preempted} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def render(job: ExportedJob) -> str:
    """The script of the job."""
    hours, minutes = divmod(max(1, round(job.hours * 60)), 60)
    return SCRIPT.format(
        name=job.name,
        nodes=job.slice.hosts,
        resources=resource_line(job),
        hours=hours,
        minutes=minutes,
        preempted=int(ExitCode.PREEMPTED),
        command=shlex.join(job.command),
    )


def resource_line(job: ExportedJob) -> str:
    """The line that requests the chips of a machine. TPUs must have the name `tpu` in Slurm's gres.conf."""
    if job.slice.chip.is_tpu:
        return f"#SBATCH --gres=tpu:{job.slice.chips // job.slice.hosts}\n"
    return f"#SBATCH --gpus-per-node={job.slice.shape[0]}\n"
