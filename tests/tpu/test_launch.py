"""The launcher against a fake of Google's API over HTTP, with real processes as machines: after any failure
the job either resumes or ends with a reason, and nothing that costs money is left behind."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import fake_gcs, forked_launcher, xla_flags
from tests.support.fake_google import Google

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")

ROOT = Path(__file__).parents[2]
RECIPE = """\
run_dir: {run}
model: {{use: llama, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128}}
data: {{path: /nowhere, sequence_length: 64}}
optimizer: {{use: adamw, learning_rate: 3e-3}}
schedule: {{use: cosine, steps: 20}}
"""
# A trainer whose nth attempt does what the nth word of a list says.
TRAINER = """\
case "$*" in
*"-m headrace train"*)
  count=$(cat "{root}/count.$HEADRACE_PROCESS" 2>/dev/null || echo 0)
  echo $((count + 1)) > "{root}/count.$HEADRACE_PROCESS"
  set -- {actions}
  shift $count
  echo "attempt $count of worker $HEADRACE_PROCESS does ${{1:-0}}"
  case "${{1:-0}}" in
    wait) trap 'echo saved; exit 75' TERM; for i in $(seq 600); do echo "step $i"; sleep 0.1; done;;
    *) exit "${{1:-0}}";;
  esac;;
*) exec "{python}" -S "$@";;
esac
"""


# Credentials that are valid until a file appears, and are checked at each request.
LOGIN = """\
import os
from google.auth.credentials import Credentials
from google.auth.exceptions import RefreshError
from headrace.tpu import google_auth
class Login(Credentials):
    valid = False
    def refresh(self, request):
        if os.path.exists("logged-out"):
            raise RefreshError("Reauthentication is needed.")
        self.token = "token"
google_auth.load_credentials = lambda url: (Login(), "project")
"""


# The launcher sends a small tree: packing the full clone takes longer than most of the tests.
USE_SMALL_TREE = """\
from pathlib import Path
from headrace.tpu import bundle
bundle.find_repository = lambda: Path({tree!r})
"""


def make_small_tree(path: Path) -> Path:
    """Create a clone with as much of Headrace as workers with a fake trainer need."""
    for name in ("pyproject.toml", "constraints.txt", "headrace/__init__.py", "headrace/tpu/__init__.py"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes((ROOT / name).read_bytes())
    (path / "headrace/tpu/worker.py").write_bytes((ROOT / "headrace/tpu/worker.py").read_bytes())
    subprocess.run(["git", "init", "-q", path], check=True)
    return path


class LaunchScenario:
    """A fake Google Cloud, a recipe, and launcher processes."""

    def __init__(self, root: Path, **google_options) -> None:
        self.root = root
        self.google = Google(root, **google_options)
        self.processes: list[forked_launcher.LauncherProcess] = []
        self.tree = make_small_tree(root / "tree")
        (root / "recipe.yaml").write_text(RECIPE.format(run=f"{root}/run"))
        self.set_trainer("0")

    def set_trainer(self, actions: str) -> None:
        self.google.set_trainer_script(TRAINER.format(root=self.root, actions=actions, python=sys.executable))

    preamble = ""  # code that launcher processes run first

    def start(self, *argv: str, **env: str) -> forked_launcher.LauncherProcess:
        env = os.environ | {"PYTHONPATH": str(ROOT)} | self.google.env() | env
        code = f"{USE_SMALL_TREE.format(tree=str(self.tree))}\n{self.preamble}"
        process = forked_launcher.start(code, ["tpu", *argv], env, self.root)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()
        self.google.close()

    def launch(self, *argv: str, **env: str) -> forked_launcher.LauncherProcess:
        slice_options = ["--slice", "v4-16", "--name", "job", "--spot", "--ssh-key", str(self.root / "key")]
        zone = [] if "--zone" in argv else ["--zone", "us-central2-b"]
        return self.start("run", *slice_options, *zone, *argv, "recipe.yaml", **env)

    def run_command(self, *argv: str, **env: str) -> tuple[int, str]:
        return wait_for_exit(self.start(*argv, **env))

    def wait_until(self, condition) -> None:
        """Wait for a condition; up to 10 minutes, and fail early if a launcher has failed."""
        deadline = time.monotonic() + 600
        while not condition():
            for process in (p for p in self.processes if p.stdout is not None and not p.stdout.closed):
                assert process.poll() in (None, 0, 75), process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def is_training(self, count: int = 2) -> bool:
        """Whether `count` workers train and each has logged its first step."""
        logs = (self.root / "machines").glob("*/home/user/.headrace/jobs/job/log")
        training_logs = [
            log for log in logs if "step 1" in log.read_text() and not (log.parents[5] / "off").exists()
        ]
        return len(self.google.trainers()) == len(training_logs) == count

    def is_nothing_left(self) -> bool:
        with self.google.lock:
            self.google.remove_deleted()
            return not self.google.nodes and not self.google.queued

    def requested_zones(self) -> list[str]:
        """Zones in which slices were requested, in order."""
        calls = [path for method, path, *_ in self.google.calls if method == "POST"]
        return [path.split("/")[5] for path in calls if path.endswith("/queuedResources")]


def wait_for_exit(process: forked_launcher.LauncherProcess) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    return process.returncode, output


def read_until(process: forked_launcher.LauncherProcess, expected: str) -> str:
    """Read the output of a process up to the line that contains `expected`."""
    output = ""
    assert process.stdout is not None
    while expected not in output:
        line = process.stdout.readline()
        assert line, output
        output += line
    return output


@pytest.fixture
def scenario(tmp_path):
    scenario = LaunchScenario(tmp_path / "story")
    yield scenario
    scenario.close()


def test_a_job_is_run_on_all_workers_and_its_slice_deleted(scenario):
    code, output = wait_for_exit(scenario.launch())
    assert code == 0, output
    assert scenario.is_nothing_left() and scenario.requested_zones() == ["us-central2-b"]
    assert "[w0] attempt 0 of worker 0 does 0" in output and "[w1] attempt 0 of worker 1 does 0" in output
    assert (
        "v4-16 spot (8 chips, 2 workers): $7.36 per hour" in output and "at most 24 h and $176.64" in output
    )
    body = next(call[3] for call in scenario.google.calls if call[0] == "POST")
    node = body["tpu"]["nodeSpec"][0]["node"]
    assert body["spot"] == {} and node["acceleratorType"] == "v4-16"
    assert node["runtimeVersion"] == "tpu-ubuntu2204-base" and node["labels"]["headrace"] == "yes"
    assert node["metadata"]["startup-script"] == (ROOT / "headrace/tpu/timer.py").read_text()


@pytest.mark.fault(30)
def test_after_a_preemption_the_old_slice_is_deleted_and_another_is_requested(scenario):
    scenario.set_trainer("wait 0")
    process = scenario.launch()
    scenario.wait_until(scenario.is_training)
    scenario.google.preempt("job")
    code, output = wait_for_exit(process)
    assert code == 0, output
    assert scenario.is_nothing_left() and len(scenario.requested_zones()) == 2
    assert "the cloud took the slice away (SUSPENDED): renting another slice" in output
    assert "in 2 attempts, about $" in output


@pytest.mark.fault(30)
def test_a_slice_that_is_lost_during_setup_is_replaced(scenario):
    (scenario.root / "install").write_text("touch installing; sleep 1\n")
    process = scenario.launch(HEADRACE_PATIENCE="5")
    scenario.wait_until(
        lambda: list((scenario.root / "machines").glob("*/home/user/.headrace/trees/*/installing"))
    )
    (scenario.root / "install").unlink()
    scenario.google.preempt("job")
    code, output = wait_for_exit(process)
    assert code == 0, output
    assert scenario.is_nothing_left() and len(scenario.requested_zones()) == 2


@pytest.mark.parametrize(("actions", "code", "slices"), [("2", 2, 1), ("75 78 137 0", 0, 1), ("77 0", 0, 2)])
def test_exit_codes_decide_what_comes_next(scenario, actions, code, slices):
    """A user error ends the job, a stopped trainer is restarted, and a faulty machine is replaced."""
    scenario.set_trainer(actions)
    exit_code, output = wait_for_exit(scenario.launch())
    assert exit_code == code, output
    assert scenario.is_nothing_left() and len(scenario.requested_zones()) == slices
    assert output.count("] attempt") == 2 * len(actions.split())


@pytest.mark.slow
def test_a_job_that_keeps_failing_is_given_up(scenario):
    scenario.set_trainer("76 76 76 76 76 76 76 76")
    code, output = wait_for_exit(scenario.launch())
    assert code == 76 and "giving up after 5 failures in a row" in output
    assert scenario.is_nothing_left()


@pytest.mark.fault(30)
def test_failed_requests_and_deletions_are_repeated(scenario):
    scenario.google.fault("GET", "", 503, count=2)
    scenario.google.fault("POST", "", 503)
    scenario.google.fault("DELETE", "", 400, "precondition: the node is busy")
    scenario.google.fault("DELETE", "", 403, "not now")
    code, output = wait_for_exit(scenario.launch())
    assert code == 0, output
    assert "the node is busy; trying again" in output and "not now; trying again" in output
    assert scenario.is_nothing_left() and not scenario.google.faults


@pytest.mark.fault(31)
def test_a_broken_connection_is_reopened_and_no_line_is_lost_or_repeated(scenario):
    scenario.set_trainer("wait 0")
    process = scenario.launch()
    scenario.wait_until(lambda: list((scenario.root / "machines").glob("*")))
    for machine in (scenario.root / "machines").glob("*"):
        (machine / "drop").touch()
    scenario.wait_until(scenario.is_training)
    time.sleep(2)
    for pid in scenario.google.trainers():
        os.kill(pid, signal.SIGTERM)
    code, output = wait_for_exit(process)
    assert code == 0, output
    assert not list((scenario.root / "machines").glob("*/drop"))
    for worker in range(2):
        steps = [
            int(line.split()[-1]) for line in output.splitlines() if line.startswith(f"[w{worker}] step")
        ]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > 5


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stopped_launcher_lets_the_trainer_save_and_deletes_the_slice(scenario, stop_signal):
    scenario.set_trainer("wait")
    process = scenario.launch()
    scenario.wait_until(scenario.is_training)
    time.sleep(0.5)
    process.send_signal(stop_signal)
    code, output = wait_for_exit(process)
    assert code == 75, output
    assert "[w0] saved" in output and "[w1] saved" in output and scenario.is_nothing_left()


def test_a_launcher_stopped_in_the_queue_leaves_no_request(scenario):
    scenario.google.stockout = {"us-central2-b"}
    process = scenario.launch()
    scenario.wait_until(lambda: scenario.google.queued)
    process.send_signal(signal.SIGINT)
    code, output = wait_for_exit(process)
    assert code == 75 and scenario.is_nothing_left(), output


def test_an_interrupted_create_leaves_no_request(scenario):
    scenario.google.stockout = {"us-central2-b"}
    options = ["--slice", "v4-16", "--zone", "us-central2-b", "--ssh-key", str(scenario.root / "key")]
    process = scenario.start("create", *options)
    scenario.wait_until(lambda: scenario.google.queued)
    process.send_signal(signal.SIGINT)
    code, output = wait_for_exit(process)
    assert code == 130 and scenario.is_nothing_left(), output


@pytest.mark.fault(32)
def test_a_launcher_that_was_killed_finds_its_job_again(scenario):
    scenario.set_trainer("wait 0")
    first = scenario.launch()
    scenario.wait_until(scenario.is_training)
    assert wait_for_exit(scenario.launch())[0] == 2  # another launcher watches it
    code, output = scenario.run_command("delete", "job")
    assert code == 2 and "stop that with Ctrl-C first" in output
    first.kill()
    first.communicate()
    trainers = scenario.google.trainers()
    code, output = scenario.run_command("ls", "--orphans")
    assert code == 1 and "job is not watched from this machine" in output
    code, output = scenario.run_command(
        "ls", "--orphans", "--ssh-key", str(scenario.root / "key")
    )  # queries the workers
    assert code == 0 and "job is training; if no other machine of yours watches it" in output
    second = scenario.launch()
    early_output = read_until(second, "found it training on 2 workers")
    assert scenario.google.trainers() == trainers  # the same processes
    code, output = scenario.run_command("status", "job", "--ssh-key", str(scenario.root / "key"))
    assert code == 0 and "[w1] training: step" in output and "deletes itself in 2" in output
    for pid in trainers:
        os.kill(pid, signal.SIGTERM)
    code, output = wait_for_exit(second)
    assert code == 0, early_output + output
    assert "[w0] step" in output
    assert len(scenario.requested_zones()) == 1 and scenario.is_nothing_left()


def test_a_job_that_reaches_its_hours_saves_and_ends(scenario):
    scenario.set_trainer("wait")
    code, output = wait_for_exit(scenario.launch("--max-hours", str(6 / 3600)))
    assert code == 75, output
    assert (
        "the limit of hours or cost is reached" in output
        and "[w0] saved" in output
        and scenario.is_nothing_left()
    )
    code, output = wait_for_exit(scenario.launch("--max-hours", str(6 / 3600)))  # in total, over all attempts
    assert code == 2 and "--max-hours or --max-cost is reached" in output and scenario.is_nothing_left()


def test_a_slice_deletes_itself_when_the_launcher_is_dead(tmp_path):
    scenario = LaunchScenario(tmp_path / "story", timers=True)
    try:
        scenario.set_trainer("wait")
        process = scenario.launch("--max-hours", str(8 / 3600))
        scenario.wait_until(scenario.is_training)
        process.kill()
        process.communicate()
        scenario.wait_until(scenario.is_nothing_left)
        logs = [file.read_text() for file in (scenario.root / "machines").glob("*/timer.log")]
        assert any("the hours of this slice are used up" in log for log in logs)
        job_logs = [
            file.read_text()
            for file in (scenario.root / "machines").glob("*/home/user/.headrace/jobs/job/log")
        ]
        assert len(job_logs) == 2 and all("saved" in text for text in job_logs)
    finally:
        scenario.close()


def test_secrets_reach_the_trainer_and_nothing_else(scenario):
    key = secrets.token_hex(6)
    show = 'case "$*" in *"-m headrace train"*) [ ${#WANDB_API_KEY} = 12 ] && echo has-key;; '
    scenario.google.set_trainer_script(f'{show}*) exec "{sys.executable}" "$@";; esac')
    code, output = wait_for_exit(scenario.launch("--env", "WANDB_API_KEY", WANDB_API_KEY=key))
    assert code == 0, output
    assert "[w0] has-key" in output and key not in output and key not in json.dumps(scenario.google.calls)
    for file in scenario.root.rglob("*"):  # ssh.log has every command line that was used
        assert not file.is_file() or key.encode() not in file.read_bytes(), file
    code, output = wait_for_exit(scenario.launch("--env", "NOT_THERE"))
    assert code == 2 and "--env NOT_THERE: found no such variable in the environment" in output


@pytest.mark.fault(30)
def test_an_expired_login_is_waited_out_and_a_failed_deletion_reported(scenario):
    scenario.preamble = LOGIN + "from headrace.tpu import timeouts\ntimeouts.DELETE_TIMEOUT = 3.0\n"
    scenario.set_trainer("wait")
    process = scenario.launch(HEADRACE_POLL="0.05", HEADRACE_PATIENCE="8")
    scenario.wait_until(scenario.is_training)
    login_expired = scenario.root / "logged-out"
    login_expired.touch()
    early_output = read_until(
        process, "Reauthentication is needed. (`gcloud auth application-default login`)"
    )
    login_expired.unlink()
    time.sleep(0.5)
    assert scenario.is_training()  # training continues
    login_expired.touch()
    process.send_signal(signal.SIGINT)
    code, output = wait_for_exit(process)
    assert code == 1 and "Traceback" not in early_output + output, output
    assert "[w0] saved" in output
    assert "COULD NOT BE DELETED AND COSTS MONEY. Delete it with: gcloud compute" in output
    assert "delete job --project=project --zone=us-central2-b" in output


def test_an_expired_login_is_reported_before_anything_is_rented(scenario):
    scenario.preamble = LOGIN
    (scenario.root / "logged-out").touch()
    for run in ("/run", "gs://near/run"):  # the location of a bucket is looked up first
        (scenario.root / "recipe.yaml").write_text(RECIPE.format(run=run))
        code, output = wait_for_exit(scenario.launch())
        assert code == 2 and "Traceback" not in output, output
        assert output.splitlines()[-1].startswith("headrace: Google Cloud: Reauthentication is needed")
    code, output = scenario.run_command("ls")
    assert code == 2 and output.count("\n") == 1 and not scenario.requested_zones(), output


@pytest.mark.fault(30)
@pytest.mark.parametrize("last_output", ["sent", "step 1"])
def test_a_closed_pipe_stops_the_job_and_deletes_the_slice(scenario, last_output):
    """As in `headrace tpu run ... | head`."""
    scenario.set_trainer("wait")
    process = scenario.launch()
    read_until(process, last_output)
    process.stdout.close()
    assert process.wait(60) == 75 and scenario.is_nothing_left()
    logs = [file.read_text() for file in scenario.root.glob("machines/*/home/user/.headrace/jobs/job/log")]
    assert last_output == "sent" or [text.endswith("saved\n") for text in logs] == [True, True]


def test_tpu_delete_works_with_a_closed_pipe(scenario):
    node = {"acceleratorType": "v4-16", "labels": {"headrace": "yes"}, "metadata": {}}
    scenario.google.make_node("projects/project/locations/us-central2-b/nodes/job", node)
    process = scenario.start("delete", "job", "--ssh-key", str(scenario.root / "key"), PYTHONUNBUFFERED="1")
    process.stdout.close()
    process.wait(60)
    assert scenario.is_nothing_left()


@pytest.mark.fault(30)
def test_unexpected_responses_of_the_cloud_do_not_end_a_healthy_run(scenario):
    scenario.set_trainer("wait 75 0")
    process = scenario.launch()
    scenario.wait_until(scenario.is_training)
    for status in (403, 404, 501):
        scenario.google.fault("GET", "", status, "what is this")
    scenario.wait_until(lambda: not scenario.google.faults)
    time.sleep(0.5)
    assert scenario.is_training()
    scenario.google.fault("GET", "", 403, "what is this", count=2)  # also between two attempts
    for pid in scenario.google.trainers():
        os.kill(pid, signal.SIGTERM)
    code, output = wait_for_exit(process)
    assert code == 0 and "the cloud does not answer: Google Cloud: GET" in output, output
    assert len(scenario.requested_zones()) == 1 and scenario.is_nothing_left()


@pytest.mark.fault(32)
def test_a_launcher_stopped_while_it_adopts_a_job_lets_the_trainer_save(scenario):
    scenario.set_trainer("wait")
    first = scenario.launch()
    scenario.wait_until(scenario.is_training)
    first.kill()
    first.communicate()
    announced = lambda: (scenario.root / "ssh.log").read_text().count("touch -c")
    before, second = announced(), scenario.launch()
    scenario.wait_until(lambda: announced() > before)
    second.send_signal(signal.SIGINT)
    code, output = wait_for_exit(second)
    assert code == 75 and scenario.is_nothing_left(), output
    logs = [file.read_text() for file in scenario.root.glob("machines/*/home/user/.headrace/jobs/job/log")]
    assert [text.endswith("saved\n") for text in logs] == [True, True], output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "found a slice of this name in us-central2-b that is v4-16 on-demand, expected v4-16 spot"),
        (
            ["--slice", "2xv4-16"],
            "found a slice of this name in us-central2-b that is v4-16 on-demand, expected 2xv4-16",
        ),
    ],
)
def test_a_slice_with_other_terms_or_another_size_is_refused(scenario, options, message):
    node = {"acceleratorType": "v4-16", "labels": {"headrace": "yes"}, "metadata": {}}
    scenario.google.make_node("projects/project/locations/us-central2-b/nodes/job", node)
    code, output = wait_for_exit(scenario.launch(*options))
    assert code == 2 and message in output and len(scenario.google.nodes) == 1, output


@pytest.mark.fault(32)
def test_a_request_in_a_zone_that_is_no_longer_requested_is_deleted(scenario):
    scenario.google.stockout = {"us-east1-d"}
    first = scenario.launch("--zone", "us-east1-d")
    scenario.wait_until(lambda: scenario.google.queued)
    first.kill()
    first.communicate()
    code, output = wait_for_exit(scenario.launch())
    assert code == 0 and "in us-east1-d, which --zone does not name: deleting it" in output, output
    assert scenario.requested_zones() == ["us-east1-d", "us-central2-b"] and scenario.is_nothing_left()


def test_a_failing_installation_is_reported_and_tried_twice(scenario):
    (scenario.root / "install").write_text("echo no such version: jax==0 >&2; exit 1\n")
    code, output = wait_for_exit(scenario.launch())
    assert code == 1 and scenario.is_nothing_left(), output
    error = "setup failed while installing: no such version: jax==0"
    assert f"{error}: restarting it" in output and f"{error}; giving up" in output
    assert output.count(error) == 2 and len(scenario.requested_zones()) == 1


def test_the_output_of_a_command_on_the_workers_is_streamed(scenario):
    node = {"acceleratorType": "v4-16", "labels": {}, "metadata": {}}
    scenario.google.make_node("projects/project/locations/us-central2-b/nodes/job", node)
    wait = 'echo here; while [ ! -e "$HOME/go" ]; do sleep 0.05; done; exit 3'
    key = str(scenario.root / "key")
    process = scenario.start("ssh", "job", "--worker", "all", "--ssh-key", key, "--", wait)
    for _ in range(2):
        assert read_until(process, "here").startswith("[w")
    for home in scenario.root.glob("machines/*/home/user"):
        (home / "go").touch()
    assert wait_for_exit(process)[0] == 3


def test_foreign_slices_are_neither_used_nor_deleted(scenario):
    node = {"acceleratorType": "v4-16", "labels": {}, "metadata": {}, "schedulingConfig": {"spot": True}}
    scenario.google.make_node("projects/project/locations/us-central2-b/nodes/job", node)
    code, output = wait_for_exit(scenario.launch())
    assert code == 2 and "that Headrace did not make" in output and len(scenario.google.nodes) == 1
    code, output = scenario.run_command("delete", "job")
    assert code == 2 and "--force" in output and len(scenario.google.nodes) == 1
    code, output = wait_for_exit(scenario.launch("--keep"))
    assert code == 0 and len(scenario.google.nodes) == 1, output
    code, output = scenario.run_command("delete", "job", "--force")
    assert code == 0 and not scenario.google.nodes, output


def losses(text: str) -> dict[int, float]:
    rows = map(json.loads, text.splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["bucket", "folder"])
def test_a_run_with_a_preemption_and_a_stop_has_the_losses_of_an_undisturbed_run(
    scenario, tiny, packed, storage
):
    """Queue, training, a preemption without warning, another slice, SIGTERM, training to the end; compared
    with the same recipe on local processes."""
    from headrace.config import reader

    if storage == "bucket":
        with fake_gcs.running("bucket", location="US-CENTRAL2") as store:
            run, env = "gs://bucket/runs", store.environment
            read = lambda name: store.buckets["bucket"][f"runs/{name}/metrics.jsonl"].data.decode()
            compare_with_undisturbed_run(
                scenario,
                reader.to_yaml(tiny(f"run_dir={run}/disturbed", *SHORT)),
                f"{run}/undisturbed",
                read,
                env,
            )
    else:
        run = str(scenario.root)
        read = lambda name: Path(f"{run}/{name}/metrics.jsonl").read_text()
        compare_with_undisturbed_run(
            scenario, reader.to_yaml(tiny(f"run_dir={run}/disturbed", *SHORT)), f"{run}/undisturbed", read, {}
        )


SHORT = ("schedule.steps=50", "checkpoint.every=5", "eval.batches=1", "mesh.fsdp=2")


def compare_with_undisturbed_run(
    scenario: LaunchScenario, recipe: str, undisturbed: str, read, env: dict[str, str]
) -> None:
    scenario.tree = ROOT
    (scenario.root / "recipe.yaml").write_text(recipe)
    scenario.google.set_trainer_script(f'exec "{sys.executable}" "$@"')
    env = env | {"HEADRACE_PATIENCE": "120"}  # time to save in, on a busy machine
    process = scenario.launch(**env)
    log = scenario.root / "launcher" / "tpu" / "project" / "job" / "w0.log"

    def last_logged_step() -> int:
        """The last logged step."""
        assert process.poll() is None, process.communicate()[0]
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return max((int(fields[0]) for fields in lines if fields and fields[0].isdigit()), default=0)

    scenario.wait_until(lambda: last_logged_step() >= 8)
    scenario.google.preempt("job")
    scenario.wait_until(lambda: len(scenario.requested_zones()) == 2)
    before = last_logged_step()
    scenario.wait_until(lambda: last_logged_step() >= before + 3)
    os.kill(scenario.google.trainers()[1], signal.SIGTERM)
    code, output = wait_for_exit(process)
    assert code == 0, output
    assert scenario.is_nothing_left() and len(scenario.requested_zones()) == 2
    assert (
        "took the slice away" in output and "training stopped and can be restarted (w0: 75, w1: 75)" in output
    )
    argv = ["run", "--platform", "local", "--slice", "v4-16", "recipe.yaml", f"run_dir={undisturbed}"]
    code, output = wait_for_exit(scenario.start(*argv, **env, XLA_FLAGS=xla_flags.flags(2)))
    assert code == 0, output
    assert "[w0] " in output and not list((scenario.root / "launcher" / "local").iterdir())
    assert losses(read("disturbed")) == losses(read("undisturbed")) and max(losses(read("undisturbed"))) == 50
