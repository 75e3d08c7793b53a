"""Upload of the small files of a run to a bucket: metrics, log, TensorBoard, recipe, profile.

Objects cannot be appended to. So these files are written to a local folder, and those that changed are
uploaded as a whole by a thread: every 15 s, before a checkpoint becomes valid, and at the end."""

import contextlib
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import UserError
from headrace.storage import files

UPLOAD_SECONDS = 15.0  # between uploads
MAX_BYTES_PER_SECOND = 1e6  # on average, for a file that is uploaded again and again as it grows
APPENDED_FILES = ("metrics.jsonl", "goodput.jsonl", "log.txt", "wandb/headrace-id")  # a resumed run appends


class Mirror:
    """A local folder, `local_dir`, whose files are copied to the run folder.

    For a run on a disk that is the run folder itself, and nothing is copied."""

    def __init__(self, run_dir: str, process: int = 0) -> None:
        self.run_dir, self.is_remote = run_dir, files.is_url(run_dir)
        self.local_dir = local_dir_of(run_dir, process) if self.is_remote else Path(run_dir)
        self.uploaded: dict[str, tuple[int, int]] = {}  # size and modification time, by name
        self.next_upload: dict[str, float] = {}  # monotonic seconds, by name
        self.problems: list[str] = []
        self.is_failing = False
        self.upload_lock, self.closed = threading.Lock(), threading.Event()

    @contextlib.contextmanager
    def open(self, *, download: bool) -> Iterator["Mirror"]:
        """Upload changes in a thread until the context ends, then upload the rest.

        `download` fetches the files that a resumed run appends to: for the host that writes them."""
        if not self.is_remote:
            yield self
            return
        if self.local_dir.is_dir() and files.exists(files.join(self.run_dir, "recipe.yaml")):
            self.recover()
        shutil.rmtree(self.local_dir, ignore_errors=True)
        self.local_dir.mkdir(parents=True)
        for name in APPENDED_FILES if download else ():
            with contextlib.suppress(FileNotFoundError):
                files.write(self.local_dir / name, files.read(files.join(self.run_dir, name)))
                self.uploaded[name] = change_stamp(self.local_dir / name)
        thread = threading.Thread(target=self.upload_periodically, name="mirror", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.closed.set()
            thread.join()
            if self.upload():
                shutil.rmtree(self.local_dir, ignore_errors=True)
            else:
                lines = [*self.drain_problems(), f"files that could not be uploaded are in {self.local_dir}"]
                print(f"headrace: {'; '.join(lines)}", file=sys.stderr)

    def recover(self) -> None:
        """Upload what an earlier attempt on this machine could not, if it continues the file in the
        bucket."""
        for name in self.list_changed():
            local_content, remote_content = (self.local_dir / name).read_bytes(), b""
            with contextlib.suppress(FileNotFoundError):
                remote_content = files.read(files.join(self.run_dir, name))
            if len(local_content) > len(remote_content) and local_content.startswith(remote_content):
                files.write(files.join(self.run_dir, name), local_content)

    def drain_problems(self) -> list[str]:
        """Return the problems since the last call."""
        problems, self.problems = self.problems, []
        return problems

    def upload_periodically(self) -> None:
        while not self.closed.wait(UPLOAD_SECONDS):
            self.upload(due=True)

    def upload(self, *, due: bool = False) -> bool:
        """Upload the files that have changed. Returns whether that worked; the next call tries again.

        With `due`, large files are skipped until MAX_BYTES_PER_SECOND allows their next upload."""
        if not self.is_remote:
            return True
        with self.upload_lock:
            try:
                for name in self.list_changed():
                    if not due or time.monotonic() > self.next_upload.get(name, 0.0):
                        self._upload_file(name)
                self.is_failing = False
            except (UserError, OSError) as error:
                if not self.is_failing:
                    self.problems.append(
                        f"metrics and log cannot be uploaded: {error}; they stay on this machine, "
                        "and training continues"
                    )
                self.is_failing = True
        return not self.is_failing

    def list_changed(self) -> list[str]:
        """Names of the files that differ from their last upload, sorted."""
        paths = sorted(path for path in self.local_dir.rglob("*") if path.is_file())
        names = [
            str(path.relative_to(self.local_dir)) for path in paths if path.suffix not in (".new", ".draft")
        ]
        names = [name for name in names if not name.startswith("wandb/") or name in APPENDED_FILES]
        return [name for name in names if self.uploaded.get(name) != change_stamp(self.local_dir / name)]

    def _upload_file(self, name: str) -> None:
        stamp = change_stamp(self.local_dir / name)  # before reading: a later change is then uploaded again
        content = (self.local_dir / name).read_bytes()
        files.write(files.join(self.run_dir, name), content)
        self.uploaded[name] = stamp
        self.next_upload[name] = time.monotonic() + len(content) / MAX_BYTES_PER_SECOND


def change_stamp(path: Path) -> tuple[int, int]:
    """Size and modification time of a file: they differ after a change."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def local_dir_of(run_dir: str, process: int) -> Path:
    """The local folder of a run in a bucket, for one process.

    All attempts of a run on a machine use the same one, so that killed ones leave one folder, not many."""
    cache = Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache/headrace")
    return cache / "runs" / f"{hashlib.sha256(run_dir.encode()).hexdigest()[:16]}-{process}"
