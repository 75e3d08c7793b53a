"""TensorBoard on the folder of a run, in a bucket or not."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from headrace.errors import UserError


def serve(run: str, port: int) -> int:
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError("tensorboard: not installed: pip install -e '.[cloud]' in a clone of Headrace")
    if "://" not in run and not Path(run).is_dir():
        raise UserError(f"{run}: found no folder, expected a run folder or gs://BUCKET/RUN")
    folder = f"{run.rstrip('/')}/tensorboard"
    print(f"http://localhost:{port} shows {folder}; Ctrl-C ends it", flush=True)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", str(port)]
    # Its fast loader knows no bucket of an emulator; the slow one reads everything.
    # And gcsfs would first ask whether it is a bucket of a newer kind, for a minute where there is no gRPC.
    env = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"} | os.environ
    return subprocess.call([*command, "--load_fast=false", "--reload_interval=15"], env=env)
