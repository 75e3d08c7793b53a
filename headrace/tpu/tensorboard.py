"""TensorBoard on the curves of a run, in a folder or a bucket."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from headrace.errors import UserError


def serve_run(run_dir: str, port: int) -> int:
    """Run TensorBoard until it is interrupted, and return its exit code."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError("tensorboard: not installed: pip install -e '.[cloud]' in a clone of Headrace")
    if "://" not in run_dir and not Path(run_dir).is_dir():
        raise UserError(f"{run_dir}: found no folder, expected a run folder or gs://BUCKET/RUN")
    log_dir = f"{run_dir.rstrip('/')}/tensorboard"
    print(f"http://localhost:{port} shows {log_dir}; Ctrl-C ends it", flush=True)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", log_dir, "--port", str(port)]
    # load_fast=false: the fast loader cannot read buckets of an emulator. GCSFS_...: otherwise gcsfs first
    # tests for a hierarchical namespace, which takes a minute where gRPC is blocked.
    env = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"} | os.environ
    return subprocess.call([*command, "--load_fast=false", "--reload_interval=15"], env=env)
