"""The launcher against Google's API over HTTP, with real processes for machines: whatever happens, the job
goes on or is told why not, and nothing is left that costs."""

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
# A trainer that does, in each life of its first worker, what the next word of a list says.
TRAINER = """\
case "$*" in
*"-m headrace train"*)
  count=$(cat "{root}/count.$HEADRACE_PROCESS" 2>/dev/null || echo 0)
  echo $((count + 1)) > "{root}/count.$HEADRACE_PROCESS"
  set -- {lives}
  shift $count
  echo "life $count of worker $HEADRACE_PROCESS does ${{1:-0}}"
  case "${{1:-0}}" in
    wait) trap 'echo saved; exit 75' TERM; for i in $(seq 600); do echo "step $i"; sleep 0.1; done;;
    *) exit "${{1:-0}}";;
  esac;;
*) exec "{python}" -S "$@";;
esac
"""


# A login that is good until a file appears, and is read anew with each request.
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


# What the launcher sends is not the whole clone: to pack it takes longer than most of the tests.
SEND_TREE = """\
from pathlib import Path
from headrace.tpu import bundle
bundle.find_repository = lambda: Path({tree!r})
"""


def make_small_tree(path: Path) -> Path:
    """A clone with as much of Headrace as workers need whose trainer is made up."""
    for name in ("pyproject.toml", "constraints.txt", "headrace/__init__.py", "headrace/tpu/__init__.py"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes((ROOT / name).read_bytes())
    (path / "headrace/tpu/worker.py").write_bytes((ROOT / "headrace/tpu/worker.py").read_bytes())
    subprocess.run(["git", "init", "-q", path], check=True)
    return path


class Story:
    """Google, a recipe and a launcher."""

    def __init__(self, root: Path, **more) -> None:
        self.root = root
        self.google = Google(root, **more)
        self.started: list[forked_launcher.LauncherProcess] = []
        self.tree = make_small_tree(root / "tree")
        (root / "recipe.yaml").write_text(RECIPE.format(run=f"{root}/run"))
        self.trainer("0")

    def trainer(self, lives: str) -> None:
        self.google.python(TRAINER.format(root=self.root, lives=lives, python=sys.executable))

    before = ""  # what the launcher's process does first

    def start(self, *argv: str, **env: str) -> forked_launcher.LauncherProcess:
        env = os.environ | {"PYTHONPATH": str(ROOT)} | self.google.env() | env
        code = f"{SEND_TREE.format(tree=str(self.tree))}\n{self.before}"
        process = forked_launcher.start(code, ["tpu", *argv], env, self.root)
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()
        self.google.close()

    def launch(self, *argv: str, **env: str) -> forked_launcher.LauncherProcess:
        more = ["--slice", "v4-16", "--name", "job", "--spot", "--ssh-key", str(self.root / "key")]
        zone = [] if "--zone" in argv else ["--zone", "us-central2-b"]
        return self.start("run", *more, *zone, *argv, "recipe.yaml", **env)

    def call(self, *argv: str, **env: str) -> tuple[int, str]:
        return end(self.start(*argv, **env))

    def until(self, condition) -> None:
        """Waits long, since machines may be busy; a launcher that has failed meanwhile ends the waiting."""
        limit = time.monotonic() + 600
        while not condition():
            for process in (one for one in self.started if one.stdout is not None and not one.stdout.closed):
                assert process.poll() in (None, 0, 75), process.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.02)

    def training(self, count: int = 2) -> bool:
        """All of them, and each has said so."""
        logs = (self.root / "machines").glob("*/home/user/.headrace/jobs/job/log")
        said = [log for log in logs if "step 1" in log.read_text() and not (log.parents[5] / "off").exists()]
        return len(self.google.trainers()) == len(said) == count

    def nothing_left(self) -> bool:
        with self.google.lock:
            self.google.bury()
            return not self.google.nodes and not self.google.queued

    def created(self) -> list[str]:
        """The zones in which slices were asked for."""
        calls = [path for method, path, *_ in self.google.calls if method == "POST"]
        return [path.split("/")[5] for path in calls if path.endswith("/queuedResources")]


def end(process: forked_launcher.LauncherProcess) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=600)
    finally:
        process.kill()
    return process.returncode, said


def hear(process: forked_launcher.LauncherProcess, words: str) -> str:
    """What it says up to that."""
    said = ""
    assert process.stdout is not None
    while words not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    return said


@pytest.fixture
def story(tmp_path):
    found = Story(tmp_path / "story")
    yield found
    found.close()


def test_a_job_is_run_on_all_workers_and_its_slice_deleted(story):
    code, said = end(story.launch())
    assert code == 0, said
    assert story.nothing_left() and story.created() == ["us-central2-b"]
    assert "[w0] life 0 of worker 0 does 0" in said and "[w1] life 0 of worker 1 does 0" in said
    assert "v4-16 spot (8 chips, 2 workers): $7.36 per hour" in said and "at most 24 h and $176.64" in said
    body = next(call[3] for call in story.google.calls if call[0] == "POST")
    node = body["tpu"]["nodeSpec"][0]["node"]
    assert body["spot"] == {} and node["acceleratorType"] == "v4-16"
    assert node["runtimeVersion"] == "tpu-ubuntu2204-base" and node["labels"]["headrace"] == "yes"
    assert node["metadata"]["startup-script"] == (ROOT / "headrace/tpu/timer.py").read_text()


@pytest.mark.fault(30)
def test_after_a_preemption_the_old_slice_is_deleted_and_another_rented(story):
    story.trainer("wait 0")
    process = story.launch()
    story.until(story.training)
    story.google.preempt("job")
    code, said = end(process)
    assert code == 0, said
    assert story.nothing_left() and len(story.created()) == 2
    assert "the cloud took the slice away (SUSPENDED): renting another slice" in said
    assert "in 2 attempts, about $" in said


@pytest.mark.fault(30)
def test_a_slice_that_is_lost_during_setup_is_replaced(story):
    (story.root / "install").write_text("touch installing; sleep 1\n")
    process = story.launch(HEADRACE_PATIENCE="5")
    story.until(lambda: list((story.root / "machines").glob("*/home/user/.headrace/trees/*/installing")))
    (story.root / "install").unlink()
    story.google.preempt("job")
    code, said = end(process)
    assert code == 0, said
    assert story.nothing_left() and len(story.created()) == 2


@pytest.mark.parametrize(("lives", "code", "slices"), [("2", 2, 1), ("75 78 137 0", 0, 1), ("77 0", 0, 2)])
def test_exit_codes_decide_what_comes_next(story, lives, code, slices):
    """A mistake ends it; a stopped trainer is started again where it was; a faulty machine is given back."""
    story.trainer(lives)
    found, said = end(story.launch())
    assert found == code, said
    assert story.nothing_left() and len(story.created()) == slices
    assert said.count("] life") == 2 * len(lives.split())


@pytest.mark.slow
def test_a_job_that_keeps_failing_is_given_up(story):
    story.trainer("76 76 76 76 76 76 76 76")
    code, said = end(story.launch())
    assert code == 76 and "giving up after 5 failures in a row" in said
    assert story.nothing_left()


@pytest.mark.fault(30)
def test_failed_requests_and_deletions_are_repeated(story):
    story.google.fault("GET", "", 503, count=2)
    story.google.fault("POST", "", 503)
    story.google.fault("DELETE", "", 400, "precondition: the node is busy")
    story.google.fault("DELETE", "", 403, "not now")
    code, said = end(story.launch())
    assert code == 0, said
    assert "the node is busy; trying again" in said and "not now; trying again" in said
    assert story.nothing_left() and not story.google.faults


@pytest.mark.fault(31)
def test_a_broken_connection_is_reopened_and_no_line_is_lost_or_repeated(story):
    story.trainer("wait 0")
    process = story.launch()
    story.until(lambda: list((story.root / "machines").glob("*")))
    for machine in (story.root / "machines").glob("*"):
        (machine / "drop").touch()
    story.until(story.training)
    time.sleep(2)
    for pid in story.google.trainers():
        os.kill(pid, signal.SIGTERM)
    code, said = end(process)
    assert code == 0, said
    assert not list((story.root / "machines").glob("*/drop"))
    for worker in range(2):
        steps = [int(line.split()[-1]) for line in said.splitlines() if line.startswith(f"[w{worker}] step")]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > 5


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stopped_launcher_lets_the_trainer_save_and_deletes_the_slice(story, number):
    story.trainer("wait")
    process = story.launch()
    story.until(story.training)
    time.sleep(0.5)
    process.send_signal(number)
    code, said = end(process)
    assert code == 75, said
    assert "[w0] saved" in said and "[w1] saved" in said and story.nothing_left()


def test_a_launcher_stopped_in_the_queue_leaves_no_request(story):
    story.google.stockout = {"us-central2-b"}
    process = story.launch()
    story.until(lambda: story.google.queued)
    process.send_signal(signal.SIGINT)
    code, said = end(process)
    assert code == 75 and story.nothing_left(), said


def test_an_interrupted_create_leaves_no_request(story):
    story.google.stockout = {"us-central2-b"}
    more = ["--slice", "v4-16", "--zone", "us-central2-b", "--ssh-key", str(story.root / "key")]
    process = story.start("create", *more)
    story.until(lambda: story.google.queued)
    process.send_signal(signal.SIGINT)
    code, said = end(process)
    assert code == 130 and story.nothing_left(), said


@pytest.mark.fault(32)
def test_a_launcher_that_was_killed_finds_its_job_again(story):
    story.trainer("wait 0")
    first = story.launch()
    story.until(story.training)
    assert end(story.launch())[0] == 2  # somebody watches it
    code, said = story.call("delete", "job")
    assert code == 2 and "stop that with Ctrl-C first" in said
    first.kill()
    first.communicate()
    trainers = story.google.trainers()
    code, said = story.call("ls", "--orphans")
    assert code == 1 and "job is not watched from this machine" in said
    code, said = story.call("ls", "--orphans", "--ssh-key", str(story.root / "key"))  # which asks them
    assert code == 0 and "job is training; if no other machine of yours watches it" in said
    second = story.launch()
    heard = hear(second, "found it training on 2 workers")
    assert story.google.trainers() == trainers  # the same processes
    code, said = story.call("status", "job", "--ssh-key", str(story.root / "key"))
    assert code == 0 and "[w1] training: step" in said and "deletes itself in 2" in said
    for pid in trainers:
        os.kill(pid, signal.SIGTERM)
    code, said = end(second)
    assert code == 0, heard + said
    assert "[w0] step" in said
    assert len(story.created()) == 1 and story.nothing_left()


def test_a_job_that_reaches_its_hours_saves_and_ends(story):
    story.trainer("wait")
    code, said = end(story.launch("--max-hours", str(6 / 3600)))
    assert code == 75, said
    assert "the limit of hours or cost is reached" in said and "[w0] saved" in said and story.nothing_left()
    code, said = end(story.launch("--max-hours", str(6 / 3600)))  # in all, over every life
    assert code == 2 and "--max-hours or --max-cost is reached" in said and story.nothing_left()


def test_a_slice_deletes_itself_when_the_launcher_is_dead(tmp_path):
    story = Story(tmp_path / "story", timers=True)
    try:
        story.trainer("wait")
        process = story.launch("--max-hours", str(8 / 3600))
        story.until(story.training)
        process.kill()
        process.communicate()
        story.until(story.nothing_left)
        logs = [file.read_text() for file in (story.root / "machines").glob("*/timer.log")]
        assert any("the hours of this slice are used up" in log for log in logs)
        said = [
            file.read_text() for file in (story.root / "machines").glob("*/home/user/.headrace/jobs/job/log")
        ]
        assert len(said) == 2 and all("saved" in text for text in said)
    finally:
        story.close()


def test_secrets_reach_the_trainer_and_nothing_else(story):
    key = secrets.token_hex(6)
    show = 'case "$*" in *"-m headrace train"*) [ ${#WANDB_API_KEY} = 12 ] && echo it-knows;; '
    story.google.python(f'{show}*) exec "{sys.executable}" "$@";; esac')
    code, said = end(story.launch("--env", "WANDB_API_KEY", WANDB_API_KEY=key))
    assert code == 0, said
    assert "[w0] it-knows" in said and key not in said and key not in json.dumps(story.google.calls)
    for file in story.root.rglob("*"):  # ssh.log has every command line that was used
        assert not file.is_file() or key.encode() not in file.read_bytes(), file
    code, said = end(story.launch("--env", "NOT_THERE"))
    assert code == 2 and "--env NOT_THERE: found no such variable in the environment" in said


@pytest.mark.fault(30)
def test_an_expired_login_is_waited_out_and_a_failed_deletion_reported(story):
    story.before = LOGIN + "from headrace.tpu import timeouts\ntimeouts.DELETE_TIMEOUT = 3.0\n"
    story.trainer("wait")
    process = story.launch(HEADRACE_POLL="0.05", HEADRACE_PATIENCE="8")
    story.until(story.training)
    out = story.root / "logged-out"
    out.touch()
    heard = hear(process, "Reauthentication is needed. (`gcloud auth application-default login`)")
    out.unlink()
    time.sleep(0.5)
    assert story.training()  # nothing was concluded, and it goes on
    out.touch()
    process.send_signal(signal.SIGINT)
    code, said = end(process)
    assert code == 1 and "Traceback" not in heard + said, said
    assert "[w0] saved" in said
    assert "COULD NOT BE DELETED AND COSTS MONEY. Delete it with: gcloud compute" in said
    assert "delete job --project=project --zone=us-central2-b" in said


def test_an_expired_login_is_reported_before_anything_is_rented(story):
    story.before = LOGIN
    (story.root / "logged-out").touch()
    for run in ("/run", "gs://near/run"):  # of a bucket, the place is asked first
        (story.root / "recipe.yaml").write_text(RECIPE.format(run=run))
        code, said = end(story.launch())
        assert code == 2 and "Traceback" not in said, said
        assert said.splitlines()[-1].startswith("headrace: Google Cloud: Reauthentication is needed")
    code, said = story.call("ls")
    assert code == 2 and said.count("\n") == 1 and not story.created(), said


@pytest.mark.fault(30)
@pytest.mark.parametrize("words", ["sent", "step 1"])
def test_a_closed_pipe_stops_the_job_and_deletes_the_slice(story, words):
    """As by `headrace tpu run ... | head`."""
    story.trainer("wait")
    process = story.launch()
    hear(process, words)
    process.stdout.close()
    assert process.wait(60) == 75 and story.nothing_left()
    logs = [file.read_text() for file in story.root.glob("machines/*/home/user/.headrace/jobs/job/log")]
    assert words == "sent" or [text.endswith("saved\n") for text in logs] == [True, True]


def test_tpu_delete_works_with_a_closed_pipe(story):
    node = {"acceleratorType": "v4-16", "labels": {"headrace": "yes"}, "metadata": {}}
    story.google.make_node("projects/project/locations/us-central2-b/nodes/job", node)
    process = story.start("delete", "job", "--ssh-key", str(story.root / "key"), PYTHONUNBUFFERED="1")
    process.stdout.close()
    process.wait(60)
    assert story.nothing_left()


@pytest.mark.fault(30)
def test_unexpected_answers_of_the_cloud_do_not_end_a_healthy_run(story):
    story.trainer("wait 75 0")
    process = story.launch()
    story.until(story.training)
    for status in (403, 404, 501):
        story.google.fault("GET", "", status, "what is this")
    story.until(lambda: not story.google.faults)
    time.sleep(0.5)
    assert story.training()
    story.google.fault("GET", "", 403, "what is this", count=2)  # also between two lives
    for pid in story.google.trainers():
        os.kill(pid, signal.SIGTERM)
    code, said = end(process)
    assert code == 0 and "the cloud does not answer: Google Cloud: GET" in said, said
    assert len(story.created()) == 1 and story.nothing_left()


@pytest.mark.fault(32)
def test_a_launcher_stopped_while_it_adopts_a_job_lets_the_trainer_save(story):
    story.trainer("wait")
    first = story.launch()
    story.until(story.training)
    first.kill()
    first.communicate()
    announced = lambda: (story.root / "ssh.log").read_text().count("touch -c")
    before, second = announced(), story.launch()
    story.until(lambda: announced() > before)
    second.send_signal(signal.SIGINT)
    code, said = end(second)
    assert code == 75 and story.nothing_left(), said
    logs = [file.read_text() for file in story.root.glob("machines/*/home/user/.headrace/jobs/job/log")]
    assert [text.endswith("saved\n") for text in logs] == [True, True], said


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "found a slice of this name in us-central2-b that is v4-16 on-demand, expected v4-16 spot"),
        (
            ["--slice", "2xv4-16"],
            "found a slice of this name in us-central2-b that is v4-16 on-demand, expected 2xv4-16",
        ),
    ],
)
def test_a_slice_with_other_terms_or_another_size_is_refused(story, more, says):
    node = {"acceleratorType": "v4-16", "labels": {"headrace": "yes"}, "metadata": {}}
    story.google.make_node("projects/project/locations/us-central2-b/nodes/job", node)
    code, said = end(story.launch(*more))
    assert code == 2 and says in said and len(story.google.nodes) == 1, said


@pytest.mark.fault(32)
def test_a_request_in_a_zone_that_is_no_longer_named_is_deleted(story):
    story.google.stockout = {"us-east1-d"}
    first = story.launch("--zone", "us-east1-d")
    story.until(lambda: story.google.queued)
    first.kill()
    first.communicate()
    code, said = end(story.launch())
    assert code == 0 and "in us-east1-d, which --zone does not name: deleting it" in said, said
    assert story.created() == ["us-east1-d", "us-central2-b"] and story.nothing_left()


def test_a_failing_installation_is_reported_and_tried_twice(story):
    (story.root / "install").write_text("echo no such version: jax==0 >&2; exit 1\n")
    code, said = end(story.launch())
    assert code == 1 and story.nothing_left(), said
    words = "setup failed while installing: no such version: jax==0"
    assert f"{words}: restarting it" in said and f"{words}; giving up" in said
    assert said.count(words) == 2 and len(story.created()) == 1


def test_the_output_of_a_command_on_the_workers_is_streamed(story):
    node = {"acceleratorType": "v4-16", "labels": {}, "metadata": {}}
    story.google.make_node("projects/project/locations/us-central2-b/nodes/job", node)
    wait = 'echo here; while [ ! -e "$HOME/go" ]; do sleep 0.05; done; exit 3'
    key = str(story.root / "key")
    process = story.start("ssh", "job", "--worker", "all", "--ssh-key", key, "--", wait)
    for _ in range(2):
        assert hear(process, "here").startswith("[w")
    for home in story.root.glob("machines/*/home/user"):
        (home / "go").touch()
    assert end(process)[0] == 3


def test_slices_of_others_are_neither_used_nor_deleted(story):
    node = {"acceleratorType": "v4-16", "labels": {}, "metadata": {}, "schedulingConfig": {"spot": True}}
    story.google.make_node("projects/project/locations/us-central2-b/nodes/job", node)
    code, said = end(story.launch())
    assert code == 2 and "that Headrace did not make" in said and len(story.google.nodes) == 1
    code, said = story.call("delete", "job")
    assert code == 2 and "--force" in said and len(story.google.nodes) == 1
    code, said = end(story.launch("--keep"))
    assert code == 0 and len(story.google.nodes) == 1, said
    code, said = story.call("delete", "job", "--force")
    assert code == 0 and not story.google.nodes, said


def losses(text: str) -> dict[int, float]:
    rows = map(json.loads, text.splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["bucket", "folder"])
def test_a_run_with_a_preemption_and_a_stop_has_the_losses_of_an_undisturbed_one(story, tiny, packed, place):
    """Queue, training, a hard preemption, another slice, SIGTERM, and on to the end; beside it the same
    recipe on a pod of this machine."""
    from headrace.config import reader

    if place == "bucket":
        with fake_gcs.running("bucket", location="US-CENTRAL2") as store:
            run, env = "gs://bucket/runs", store.environment
            read = lambda name: store.buckets["bucket"][f"runs/{name}/metrics.jsonl"].data.decode()
            whole_story(
                story, reader.to_yaml(tiny(f"run_dir={run}/broken", *SHORT)), f"{run}/whole", read, env
            )
    else:
        run = str(story.root)
        read = lambda name: Path(f"{run}/{name}/metrics.jsonl").read_text()
        whole_story(story, reader.to_yaml(tiny(f"run_dir={run}/broken", *SHORT)), f"{run}/whole", read, {})


SHORT = ("schedule.steps=50", "checkpoint.every=5", "eval.batches=1", "mesh.fsdp=2")


def whole_story(story: Story, recipe: str, whole: str, read, env: dict[str, str]) -> None:
    story.tree = ROOT
    (story.root / "recipe.yaml").write_text(recipe)
    story.google.python(f'exec "{sys.executable}" "$@"')
    env = env | {"HEADRACE_PATIENCE": "120"}  # to save in, on a machine that has much else to do
    process = story.launch(**env)
    log = story.root / "launcher" / "tpu" / "project" / "job" / "w0.log"

    def newest() -> int:
        """The step that was shown last."""
        assert process.poll() is None, process.communicate()[0]
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return max((int(words[0]) for words in lines if words and words[0].isdigit()), default=0)

    story.until(lambda: newest() >= 8)
    story.google.preempt("job")
    story.until(lambda: len(story.created()) == 2)
    before = newest()
    story.until(lambda: newest() >= before + 3)
    os.kill(story.google.trainers()[1], signal.SIGTERM)
    code, said = end(process)
    assert code == 0, said
    assert story.nothing_left() and len(story.created()) == 2
    assert "took the slice away" in said and "training stopped and can be restarted (w0: 75, w1: 75)" in said
    argv = ["run", "--platform", "local", "--slice", "v4-16", "recipe.yaml", f"run_dir={whole}"]
    code, said = end(story.start(*argv, **env, XLA_FLAGS=xla_flags.flags(2)))
    assert code == 0, said
    assert "[w0] " in said and not list((story.root / "launcher" / "local").iterdir())
    assert losses(read("broken")) == losses(read("whole")) and max(losses(read("whole"))) == 50
