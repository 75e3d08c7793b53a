"""Workers over the real ssh, to a server on this machine: quoting, standard input, exit codes, and a broken
connection."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.tpu import job, workers
from tests.support.fake_machine import free_port

pytest.importorskip("asyncssh", reason="needs asyncssh")
pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh")

SERVER = """
import asyncio, os, sys
import asyncssh
folder, port = sys.argv[1:]

async def pump(source, target):
    while piece := await source.read(65536):
        target.write(piece)

async def feed_stdin(process, child):
    try:
        await pump(process.stdin, child.stdin)
        child.stdin.close()
    except OSError:
        pass

async def handle(process):
    pipe = asyncio.subprocess.PIPE
    env = dict(os.environ, HOME=f"{folder}/home", PYTHONPATH="")
    pipes = dict(stdin=pipe, stdout=pipe, stderr=pipe)
    child = await asyncio.create_subprocess_shell(process.command, env=env, **pipes)
    reading = asyncio.create_task(feed_stdin(process, child))
    await asyncio.gather(pump(child.stdout, process.stdout), pump(child.stderr, process.stderr))
    code = await child.wait()
    reading.cancel()
    process.exit(code)

async def main():
    keys = dict(server_host_keys=[f"{folder}/host"], authorized_client_keys=f"{folder}/key.pub")
    await asyncssh.listen("127.0.0.1", int(port), process_factory=handle, encoding=None, **keys)
    print("ready", flush=True)
    await asyncio.Future()

asyncio.run(main())
"""
PYTHON = """\
#!/bin/bash
case "$*" in
*"-m headrace train"*)
  echo "a key of ${{#KEY}} letters"
  for i in 1 2 3 4 5 6; do echo "step $i"; sleep 0.2; done
  exit 75;;
*) exec "{python}" "$@";;
esac
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder with keys, a home directory, and a function that starts a server."""
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "home" / ".headrace" / "env" / "bin").mkdir(parents=True)
    (tmp_path / "home" / ".headrace" / "tree").symlink_to(Path(job.__file__).parents[2])
    python = tmp_path / "home" / ".headrace" / "env" / "bin" / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    port, running = free_port(), []

    def start() -> subprocess.Popen:
        command = [sys.executable, "-c", SERVER, str(tmp_path), str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    monkeypatch.setenv("HEADRACE_SSH", f"ssh -p {port}")
    yield tmp_path, start
    for process in running:
        process.kill()
        process.communicate()


def test_a_job_is_started_and_followed_over_ssh_also_when_the_server_goes_away(machine):
    folder, start = machine
    server = start()
    pod = workers.ssh_workers(["127.0.0.1"], folder / "key", folder / "known")
    output = pod.run_on(0, 'echo "it\'s $((6 * 7)) in $HOME"; cat', b"bytes \0 and \"quotes'\n")
    assert output == f"it's 42 in {folder}/home\nbytes \0 and \"quotes'\n"
    with pytest.raises(workers.WorkerFailed) as failed:
        pod.run_on(0, "echo because >&2; exit 7")
    assert failed.value.worker_exit_code == 7 and "because" in str(failed.value)
    lines: list[str] = []
    task = job.Job("one", "a: 1\n", {"KEY": "secret"})
    (started,) = task.start_trainers(pod, retry_seconds=0)
    monitor = job.JobMonitor(pod, "one", [started.offset], lines.append)
    while "[w0] step 2" not in lines:
        monitor.print_lines_for(0.1)
    server.kill()
    server.wait()
    with pytest.raises(workers.WorkerFailed) as failed:
        pod.run_on(0, "true")
    assert failed.value.worker_exit_code == workers.UNREACHABLE
    start()
    while not monitor.all_ended:
        monitor.print_lines_for(0.2)
    assert monitor.exit_codes == [75]
    assert lines == ["[w0] a key of 6 letters", *(f"[w0] step {n}" for n in range(1, 7))]
