"""A run whose data, checkpoints, metrics and lock are in a bucket: real HTTP, real processes, and faults."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint import inventory, manifest
from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.cli import main as cli_main
from headrace.config import reader, recipe
from headrace.errors import ExitCode, Unreachable, UserError
from headrace.storage import bucket_sync, files, lock
from headrace.training import run as training_run
from headrace.training.evaluate import evaluate_run
from tests.checkpoint.test_manager import about, state
from tests.e2e.test_multihost import finish as hosts_finish
from tests.e2e.test_multihost import start as hosts_start
from tests.e2e.test_train import rows
from tests.support import xla_flags
from tests.support.fake_gcs import Store

EXPIRED = dict(status=401, said="Invalid Credentials")  # a token that has expired
BUSY = [dict(status=503), dict(status=429), dict(how="drop"), dict(how="cut"), dict(how="lost")]


def upload(server: Store, folder: str | Path, prefix: str) -> str:
    for path in (path for path in Path(folder).rglob("*") if path.is_file()):
        server.put("bucket", f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
    return f"gs://bucket/{prefix}"


def test_files_of_a_bucket_are_like_those_of_a_disk(bucket: Store, tmp_path: Path) -> None:
    results = []
    for folder in ("gs://bucket/some", str(tmp_path / "some")):
        files.write(f"{folder}/a.txt", b"one")
        files.write(f"{folder}/a.txt", b"two")
        files.write(f"{folder}/b/c d#?.txt", b"")
        listed = files.list_files(folder)
        with pytest.raises(FileNotFoundError):
            files.read(f"{folder}/none")
        before = (files.list_names(folder), {name: entry.size for name, entry in listed.items()})
        files.move(f"{folder}/b", f"{folder}/d/e")
        after = (
            files.list_names(f"{folder}/b"),
            list(files.list_files(folder)),
            files.read(f"{folder}/a.txt"),
        )
        kinds = [files.exists(f"{folder}/{name}") for name in ("d", "b", "a.txt")]
        with files.local_copy(folder, ["a.txt", "none"]) as near:
            fetched = (near / "a.txt").read_bytes(), (near / "none").exists()
        files.remove(f"{folder}/d")
        files.remove(f"{folder}/d")
        results.append(
            (*before, *after, kinds, fetched, files.list_names(folder), files.list_names(f"{folder}/d"))
        )
    assert results[0] == results[1]
    assert results[0][1] == {"a.txt": 3, "b/c d#?.txt": 0}


@pytest.mark.parametrize("how", [*BUSY, EXPIRED], ids=lambda how: str(next(iter(how.values()))))
@pytest.mark.fault(20)
def test_requests_to_a_busy_bucket_are_repeated(bucket: Store, how: dict) -> None:
    content = os.urandom(3000)
    faults = [bucket.fail(match, **how) for match in ("POST /upload", "GET /download", "GET .*delimiter=")]
    files.write("gs://bucket/x/file", content)
    assert files.read("gs://bucket/x/file") == content
    assert files.list_names("gs://bucket/x") == ["file"]
    assert all(fault.met > 1 for fault in faults)


def test_a_silent_connection_is_given_up(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RESPONSE_TIMEOUT", 0.3)
    bucket.put("bucket", "x", b"slow")
    bucket.fail("GET", delay=2.0)
    started = time.perf_counter()
    assert files.read("gs://bucket/x") == b"slow"
    assert time.perf_counter() - started < 1.9


@pytest.mark.fault(20)
def test_refusals_are_reported_at_once_and_transient_errors_after_retries(bucket: Store) -> None:
    started = time.perf_counter()
    for refused in (401, 403):
        bucket.fail("x", status=refused, times=99)
        with pytest.raises(UserError, match=r"gs://bucket/x may not be written .*check the credentials"):
            files.write("gs://bucket/x", b"")
        bucket.faults.clear()
    with pytest.raises(UserError, match=r"there is no bucket nowhere; .*buckets create gs://nowhere"):
        files.write("gs://nowhere/x", b"")
    assert time.perf_counter() - started < 1
    bucket.fail("x", status=503, times=999)
    with pytest.raises(Unreachable, match=r"gs://bucket/x could not be read in 6 tries; .*503") as raised:
        files.read("gs://bucket/x")
    assert raised.value.exit_code == 74


def saving(run: str, *numbers: int, keep: int = 9) -> Checkpoints:
    checkpoints = Checkpoints(run, keep=keep)
    for number in numbers:
        assert checkpoints.save(number, state(number), about(number))
    assert checkpoints.wait() and not checkpoints.drain_problems()
    return checkpoints


@pytest.mark.fault(20)
def test_checkpoints_in_a_busy_bucket_are_intact_and_sealed_without_being_read(bucket: Store) -> None:
    faults = [
        bucket.fail("POST .*d/[0-9a-f]{32}", status=503, times=2),
        bucket.fail("POST .*manifest.ocdbt", how="drop"),
        bucket.fail("POST .*_METADATA", status=429),
        bucket.fail("GET .*manifest.ocdbt", delay=0.3, times=2),
        bucket.fail("POST .*commit_success", how="lost"),
        bucket.fail("POST .*manifest.txt", how="lost"),
    ]
    checkpoints = saving("gs://bucket/run", 1, 2, 3, keep=2)
    assert all(fault.met > 1 for fault in faults)
    assert inventory.step_numbers("gs://bucket/run") == [2, 3]
    assert not bucket.names("bucket", "run/checkpoints/1/")
    num_requests = len(bucket.requests)
    assert inventory.find_resume_point("gs://bucket/run") == inventory.ResumePoint(3, {})
    contents = [line for line in bucket.requests[num_requests:] if "alt=media" in line]
    assert len(contents) == 1 and "manifest.txt" in contents[0]
    restored = checkpoints.restore(3, state(0))
    np.testing.assert_array_equal(restored.params["w"], state(3).params["w"])
    checkpoints.close()


@pytest.mark.fault(9)
def test_a_damaged_step_in_a_bucket_is_quarantined_and_no_file_of_it_is_lost(bucket: Store) -> None:
    saving("gs://bucket/run", 1, 2).close()
    name = next(name for name in bucket.names("bucket", "run/checkpoints/2/") if "/d/" in name)
    content = bytearray(bucket.buckets["bucket"][name].data)
    content[len(content) // 2] ^= 1
    bucket.put("bucket", name, bytes(content))
    before = bucket.names("bucket", "run/checkpoints/2/")
    chosen = inventory.find_resume_point("gs://bucket/run")
    assert chosen.step == 1 and "checksum" in chosen.rejected[2].text
    # The move is cut off after some files; the next one finds the step still damaged and moves the rest.
    refusal = bucket.fail("rewriteTo|copyTo|moveTo", status=403, skip=5, times=99)
    with pytest.raises(UserError, match="may not be moved"):
        inventory.quarantine("gs://bucket/run", {2: "a test"})
    bucket.faults.remove(refusal)
    chosen = inventory.find_resume_point("gs://bucket/run")
    assert chosen.step == 1 and list(chosen.rejected) == [2]
    time.sleep(1.1 - time.time() % 1)  # quarantine is named after the second
    inventory.quarantine("gs://bucket/run", {2: "a test"})
    aside = bucket.names("bucket", "run/checkpoints/quarantine/")
    assert sorted(name.split("/", 4)[4] for name in aside) == [name.split("/", 3)[3] for name in before]
    assert inventory.find_resume_point("gs://bucket/run") == inventory.ResumePoint(1, {})


def test_an_interrupted_save_or_removal_in_a_bucket_leaves_no_step(bucket: Store) -> None:
    """Both leave a folder with the step's number, but with neither a manifest nor commit_success.txt."""
    saving("gs://bucket/run", 1, 2, 3).close()
    del bucket.buckets["bucket"]["run/checkpoints/3/commit_success.txt"]
    del bucket.buckets["bucket"]["run/checkpoints/3/manifest.txt"]
    refusal = bucket.fail("DELETE .*/run/checkpoints/1", status=403, skip=2, times=99)
    with pytest.raises(UserError, match="may not be removed"):
        inventory.remove_step("gs://bucket/run", 1)
    bucket.faults.remove(refusal)
    assert inventory.step_numbers("gs://bucket/run") == [2]
    assert inventory.find_resume_point("gs://bucket/run") == inventory.ResumePoint(2, {})
    inventory.remove_unfinished("gs://bucket/run")
    assert {name.split("/")[2] for name in bucket.names("bucket", "run/checkpoints/")} == {"2"}


@pytest.mark.fault(10)
def test_a_sealed_step_in_a_bucket_that_lost_a_file_is_damaged_and_not_unfinished(bucket: Store) -> None:
    saving("gs://bucket/run", 1, 2).close()
    for number in (1, 2):
        del bucket.buckets["bucket"][f"run/checkpoints/{number}/commit_success.txt"]
    inventory.remove_unfinished("gs://bucket/run")
    assert inventory.step_numbers("gs://bucket/run") == [1, 2]
    with pytest.raises(UserError, match=r"step 2: commit_success.txt is missing; step 1: commit_success"):
        Checkpoints("gs://bucket/run", keep=1).find_resume_step()


def test_a_save_that_a_bucket_refuses_is_reported_and_training_continues(bucket: Store) -> None:
    checkpoints = Checkpoints("gs://bucket/run", keep=2)
    bucket.fail("POST .*commit_success", status=403, times=9)
    checkpoints.save(1, state(1), about(1))
    assert not checkpoints.wait()
    (problem,) = checkpoints.drain_problems()
    assert "step 1: the checkpoint could not be written" in problem and "Forbidden" in problem
    bucket.faults.clear()
    assert checkpoints.save(2, state(2), about(2)) and checkpoints.wait()
    assert inventory.step_numbers("gs://bucket/run") == [2]
    checkpoints.close()


def test_changed_files_of_a_run_are_uploaded(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_sync, "UPLOAD_SECONDS", 0.05)
    bucket.put("bucket", "run/log.txt", b"before\n")
    with bucket_sync.Mirror("gs://bucket/run").open(download=True) as mirror:
        log = mirror.local_dir / "log.txt"
        with log.open("a") as file:
            file.write("after\n")
        (mirror.local_dir / "tensorboard").mkdir()
        (mirror.local_dir / "tensorboard/events").write_bytes(b"x" * 100)
        (mirror.local_dir / "wandb").mkdir()
        (mirror.local_dir / "wandb/cache").write_bytes(b"x")
        while "run/tensorboard/events" not in bucket.names("bucket"):
            time.sleep(0.01)
        assert mirror.upload() and bucket.buckets["bucket"]["run/log.txt"].data == b"before\nafter\n"
        refusal = bucket.fail("POST", status=403, times=99)
        (mirror.local_dir / "metrics.jsonl").write_bytes(b"{}\n")
        assert not mirror.upload() and not mirror.upload()
        assert len(problems := mirror.drain_problems()) == 1 and "training continues" in problems[0]
        bucket.faults.remove(refusal)
    assert bucket.buckets["bucket"]["run/metrics.jsonl"].data == b"{}\n"
    assert bucket.names("bucket") == ["run/log.txt", "run/metrics.jsonl", "run/tensorboard/events"]
    assert not mirror.local_dir.exists()


def test_a_large_file_that_grows_is_not_uploaded_each_time(
    bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_sync, "MAX_BYTES_PER_SECOND", 1e3)
    with bucket_sync.Mirror("gs://bucket/run").open(download=False) as mirror:
        events = mirror.local_dir / "events"
        for size in (3000, 3001, 3002):
            events.write_bytes(b"x" * size)
            mirror.upload(due=True)
        assert len(bucket.buckets["bucket"]["run/events"].data) == 3000
    assert len(bucket.buckets["bucket"]["run/events"].data) == 3002


def test_files_that_cannot_be_uploaded_at_the_end_stay_on_this_machine(
    bucket: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with bucket_sync.Mirror("gs://bucket/run").open(download=False) as mirror:
        (mirror.local_dir / "metrics.jsonl").write_bytes(b"{}\n")
        bucket.fail("POST", status=403, times=99)
    output = capsys.readouterr().err
    assert f"files that could not be uploaded are in {mirror.local_dir}" in output
    assert (mirror.local_dir / "metrics.jsonl").read_bytes() == b"{}\n"
    bucket.faults.clear()
    bucket.put("bucket", "run/recipe.yaml", b"run: x\n")
    (mirror.local_dir / "log.txt").write_bytes(b"of another run\n")
    bucket.put("bucket", "run/log.txt", b"there\n")
    with bucket_sync.Mirror("gs://bucket/run").open(download=True) as mirror:  # the next attempt uploads it
        assert (mirror.local_dir / "metrics.jsonl").read_bytes() == b"{}\n"
        assert (mirror.local_dir / "log.txt").read_bytes() == b"there\n"


RUN = "gs://bucket/run"


@pytest.mark.fault(23)
def test_only_one_of_many_processes_gets_the_lock(bucket: Store) -> None:
    """Even if the response to the process that got it is lost, so that it repeats the request."""
    bucket.fail("POST .*lock", how="lost", times=3)
    inside, most, refused = 0, 0, 0
    turn = threading.Lock()

    def compete() -> None:
        nonlocal inside, most, refused
        try:
            with lock.lock(RUN):
                with turn:
                    inside, most = inside + 1, max(most, inside + 1)
                time.sleep(0.5)
                with turn:
                    inside -= 1
        except UserError as error:
            assert "another process trains in this folder (pid" in str(error)
            refused += 1

    lock_wait = pytest.MonkeyPatch()
    lock_wait.setattr(lock, "RENEW_SECONDS", 0.1)
    try:
        threads = [threading.Thread(target=compete) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        lock_wait.undo()
    assert most == 1 and refused >= 1
    assert bucket.names("bucket") == []


def owner(bucket: Store, age: float, **about: object) -> None:
    """Write the lock of another process, `age` seconds old."""
    content = {"id": "x", "host": "elsewhere", "pid": 7, "machine": "elsewhere"} | about
    bucket.put("bucket", "run/.lock", json.dumps(content).encode()).updated -= age


def test_a_lock_that_was_not_renewed_for_long_is_taken_over(bucket: Store) -> None:
    owner(bucket, lock.EXPIRY_SECONDS + 5)
    bucket.clock = 7200.0  # the clocks of machines do not count
    bucket.buckets["bucket"]["run/.lock"].updated += 7200.0
    with lock.lock(RUN):
        held = json.loads(bucket.buckets["bucket"]["run/.lock"].data)
        assert held["pid"] == os.getpid()
    assert bucket.names("bucket") == []


def test_an_owner_that_may_be_dead_is_waited_for(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.3)
    monkeypatch.setattr(lock, "EXPIRY_SECONDS", 3.0)
    owner(bucket, 1.0)
    lines: list[str] = []
    with lock.lock(RUN, on_wait=lines.append):
        pass
    assert len(lines) == 1 and "is locked by pid 7 on elsewhere, which last renewed the lock" in lines[0]
    owner(bucket, 0.0)

    def beat() -> None:
        time.sleep(0.5)
        owner(bucket, 0.0)

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(UserError, match=r"another process trains in this folder .pid 7 on elsewhere"):
        lock.lock(RUN).__enter__()
    beating.join()


def test_the_lock_of_a_dead_process_of_this_machine_is_taken_over_at_once(bucket: Store) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    owner(bucket, 0.0, machine=lock.machine_id(), pid=gone.pid)
    with lock.lock(RUN, on_wait=lambda line: pytest.fail(line)):
        pass
    owner(bucket, 0.0, machine=lock.machine_id(), pid=os.getppid())
    assert not lock.is_dead(lock.parse_owner(bucket.buckets["bucket"]["run/.lock"].data))
    assert not lock.is_dead({}) and lock.parse_owner(b"\0nonsense") == {}


def test_a_process_that_lost_its_lock_ends_without_touching_the_new_one(bucket: Store) -> None:
    """One that was suspended for minutes, for example, while another took over."""
    program = (
        "import time\nfrom headrace.storage import lock\nlock.RENEW_SECONDS = 0.2\n"
        f"with lock.lock({RUN!r}):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    bucket.fail("POST .*lock", status=503)  # a renewal that is late does not lose the lock
    time.sleep(1.5)
    assert process.poll() is None
    owner(bucket, 0.0)
    _, output = process.communicate(timeout=20)
    assert process.returncode == lock.LEASE_LOST and "another process took this run over" in output
    assert json.loads(bucket.buckets["bucket"]["run/.lock"].data)["pid"] == 7


def test_a_run_folder_at_another_kind_of_url_is_refused(tiny) -> None:
    with pytest.raises(UserError, match=r"run_dir: found memory://x, expected a local folder or gs://"):
        training_run.run(tiny("run_dir=memory://x"))


def test_a_short_run_in_a_bucket_writes_the_files_of_a_run_on_a_disk(
    bucket: Store, tiny, packed: str
) -> None:
    data = upload(bucket, packed, "data")
    cfg = tiny("run_dir=gs://bucket/run", f"data.path={data}", "log.tensorboard=true", "schedule.steps=2")
    assert training_run.run(cfg) == 0
    names = {name.split("/")[1] for name in bucket.names("bucket", "run/")}
    assert names >= {
        "recipe.yaml",
        "metrics.jsonl",
        "log.txt",
        "checkpoints",
        "tensorboard",
        "tokenizer.json",
    }
    assert ".lock" not in names
    lines = bucket.buckets["bucket"]["run/metrics.jsonl"].data.decode().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 2]
    assert inventory.find_resume_point("gs://bucket/run") == inventory.ResumePoint(2, {})
    assert recipe.load_train("gs://bucket/run/recipe.yaml").run_dir == "gs://bucket/run"


@pytest.mark.slow
def test_a_run_in_a_bucket_equals_the_run_on_a_disk(bucket: Store, tiny, tmp_path: Path, packed: str) -> None:
    """Stopped and resumed: its losses, its records and its evaluation are equal."""
    data = upload(bucket, packed, "data")
    for match in ("POST", "GET .*alt=media", "GET .*delimiter"):
        for at, how in enumerate(BUSY):
            bucket.fail(match, skip=7 * at + 3, **how)
    far = tiny("run_dir=gs://bucket/run", f"data.path={data}", "log.tensorboard=true", "schedule.steps=8")
    near = tiny("schedule.steps=8")
    cut = ("schedule.steps=8", "run_dir=gs://bucket/run", f"data.path={data}", "log.tensorboard=true")
    assert training_run.run(near) == 0
    stopped = tiny(*cut, "checkpoint.every=3")
    patch = pytest.MonkeyPatch()
    patch.setattr(
        training_run.Stopper,
        "should_stop",
        lambda self, step: self.__setattr__("stop_signal", "X") or step == 4,
    )
    assert training_run.run(stopped) == ExitCode.PREEMPTED
    patch.undo()
    assert inventory.step_numbers("gs://bucket/run") == [3, 4]
    assert training_run.run(far) == 0
    lines = bucket.buckets["bucket"]["run/metrics.jsonl"].data.decode().splitlines()
    losses = {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}
    assert losses == {row["step"]: row["loss"] for row in rows(near)} and len(losses) == 8
    log = bucket.buckets["bucket"]["run/log.txt"].data.decode()
    assert "stopped by X" in log and "from step 4 to 8" in log
    assert len(bucket.names("bucket", "run/tensorboard/events")) == 2
    assert "run/.lock" not in bucket.names("bucket")
    assert evaluate_run(open_run(recipe.load_run("gs://bucket/run"))) == evaluate_run(
        open_run(recipe.load_run(near.run_dir))
    )
    assert sum(fault.met > fault.skip for fault in bucket.faults) > 9


def test_checkpoint_commands_on_a_run_in_a_bucket(
    bucket: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saving("gs://bucket/run", 1, 2, 3).close()
    for argv, code, says in (
        (["ls", RUN], 0, r"3  temporary .* intact"),
        (["verify", RUN], 0, "step 2: intact"),
        (["diff", RUN, "1", "2"], 1, "recipe: seed: 1 -> 2"),
        (["prune", RUN, "--keep", "1"], 0, "step 2: removed"),
        (["ls", "gs://bucket/nothing"], 2, ""),
    ):
        assert cli_main.main(["checkpoint", *argv]) == code
        assert re.search(says, capsys.readouterr().out)
    assert inventory.step_numbers(RUN) == [3]
    bucket.buckets["bucket"]["run/checkpoints/3/params/_METADATA"].data += b" "
    assert cli_main.main(["checkpoint", "verify", RUN]) == 1
    assert "damaged: params/_METADATA" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["eval", "gs://nowhere/run"], "there is no bucket nowhere"),
        (["eval", "gs://bucket/nothing"], "not a run folder: no recipe.yaml in it"),
        (["generate", "gs://bucket/secret"], "secret/recipe.yaml may not be read .*check the credentials"),
        (["checkpoint", "verify", "gs://bucket/secret"], "may not be read .*check the credentials"),
        (["train", "RECIPE", "run_dir=gs://nowhere/run"], "there is no bucket nowhere"),
        (["train", "RECIPE", "data.path=gs://nowhere/data"], "there is no bucket nowhere"),
        (
            ["train", "RECIPE", "run_dir=gs://bucket/secret"],
            "secret/.lock may not be .*check the credentials",
        ),
        (["train", "RECIPE", "data.path=gs://bucket/secret"], "index.json may not be read"),
        (
            ["train", "RECIPE", "init_from=gs://bucket/nothing"],
            "expected a run folder, or a Hugging Face folder on this machine",
        ),
    ],
)
def test_a_missing_or_forbidden_bucket_is_reported_in_one_line(
    bucket: Store, tiny, tmp_path: Path, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.fail("secret", status=403, times=99)
    tiny()
    argv = [str(tmp_path / "recipe.yaml") if word == "RECIPE" else word for word in argv]
    started = time.perf_counter()
    assert cli_main.main(argv) == 2
    output = capsys.readouterr().err.strip().splitlines()[-1]
    assert output.startswith("headrace: ") and re.search(says, output)
    assert time.perf_counter() - started < 4


@pytest.mark.fault(20)
def test_a_save_that_a_bucket_refuses_is_reported_and_the_next_is_tried(
    bucket: Store, tiny, tmp_path: Path, packed: str
) -> None:
    """An expired token, for example, which tensorstore does not refresh."""
    cfg = tiny("run_dir=gs://bucket/run", f"data.path={upload(bucket, packed, 'data')}", "checkpoint.every=4")
    (tmp_path / "recipe.yaml").write_text(reader.to_yaml(cfg))
    fault = bucket.fail("checkpoints/4/params/ocdbt.process_0/d/", **EXPIRED)
    command = [sys.executable, "-m", "headrace", "train", str(tmp_path / "recipe.yaml")]
    env = os.environ | {"XLA_FLAGS": xla_flags.flags(1)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and fault.met, output
    assert "step 4: the checkpoint could not be written" in output and "ERROR:absl" not in output
    assert inventory.find_resume_point("gs://bucket/run").step == 12


@pytest.mark.slow
@pytest.mark.fault(20)
def test_a_process_killed_with_a_busy_bucket_resumes_to_the_same_weights(
    bucket: Store, tiny, tmp_path: Path, packed: str
) -> None:
    """The worker of a supervised run is killed and restarted, and takes over its lock."""
    data = upload(bucket, packed, "data")
    long = ("schedule.steps=60", "checkpoint.every=5", "log.tensorboard=true", f"data.path={data}")
    for name in ("uninterrupted", "killed"):
        cfg = tiny(f"run_dir=gs://bucket/{name}", *long)
        (tmp_path / f"{name}.yaml").write_text(reader.to_yaml(cfg))

    def start(name: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "headrace", "train", str(tmp_path / f"{name}.yaml")],
            env=os.environ | {"XLA_FLAGS": xla_flags.flags(1)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    uninterrupted = start("uninterrupted")
    output, _ = uninterrupted.communicate(timeout=300)
    assert uninterrupted.returncode == 0, output
    for number in range(60):
        bucket.fail("killed", skip=40 * number, delay=0.05 * (number % 7), **BUSY[number % 5])
    killed = start("killed")
    while killed.poll() is None and not any(
        name.endswith("/10/manifest.txt") for name in bucket.names("bucket", "killed/")
    ):
        time.sleep(0.01)
    workers = subprocess.run(["pgrep", "-P", str(killed.pid)], capture_output=True, text=True).stdout.split()
    assert workers, killed.communicate(timeout=60)[0]
    os.kill(int(workers[0]), signal.SIGKILL)
    output, _ = killed.communicate(timeout=300)
    assert killed.returncode == 0, output
    assert "was ended by SIGKILL" in output and "it restarts from step" in output
    assert cli_main.main(["checkpoint", "diff", "gs://bucket/uninterrupted", "gs://bucket/killed"]) == 1
    first, second = (
        dict(open_run(recipe.load_run(f"gs://bucket/{name}"), item="params").params.__dict__)
        for name in ("uninterrupted", "killed")
    )
    for name, value in training_run.module.named_leaves(first):
        np.testing.assert_array_equal(
            value, dict(training_run.module.named_leaves(second))[name], err_msg=name
        )
    records = [
        {
            row["step"]: row["loss"]
            for row in map(json.loads, bucket.buckets["bucket"][f"{name}/metrics.jsonl"].data.splitlines())
            if "loss" in row
        }
        for name in ("uninterrupted", "killed")
    ]
    assert records[0] == records[1] and len(records[0]) == 60
    assert "was ended by SIGKILL" in bucket.buckets["bucket"]["killed/log.txt"].data.decode()


READ_ONLY = """
mount --bind {folder} {folder} && mount -o remount,bind,ro {folder} || exit 90
touch {folder}/x 2>/dev/null && exit 90
"""


def read_only(folder: Path, *commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Run commands that see a folder as a disk that is mounted read-only."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    lines = [
        READ_ONLY.format(folder=folder),
        *("'" + "' '".join(command) + "' || exit $?" for command in commands),
    ]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", "\n".join(lines)],
        env=os.environ | {"XLA_FLAGS": xla_flags.flags(1)},
        capture_output=True,
        text=True,
    )
    if done.returncode == 90 or "unshare" in done.stderr:
        pytest.skip("needs permission to mount")
    return done


@pytest.mark.slow
def test_data_and_runs_on_a_read_only_disk_can_be_used(tiny, tmp_path: Path, packed: str) -> None:
    disk = tmp_path / "disk"
    shutil.copytree(packed, disk / "data")
    assert training_run.run(tiny(f"run_dir={disk}/run", f"data.path={disk}/data", "schedule.steps=2")) == 0
    cfg = tiny(f"data.path={disk}/data", f"init_from={disk}/run", "schedule.steps=2")
    (tmp_path / "recipe2.yaml").write_text(reader.to_yaml(cfg))
    headrace = [sys.executable, "-m", "headrace"]
    done = read_only(
        disk,
        [*headrace, "train", str(tmp_path / "recipe2.yaml"), "--once"],
        [*headrace, "eval", f"{disk}/run"],
        [*headrace, "checkpoint", "verify", f"{disk}/run"],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "weights from" in done.stdout and "evaluation loss" in done.stdout and "intact" in done.stdout


@pytest.mark.fault(25)
def test_a_read_only_run_folder_is_reported(tiny, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "recipe2.yaml").write_text(reader.to_yaml(tiny(f"run_dir={tmp_path}/disk/run")))
    command = [sys.executable, "-m", "headrace", "train", str(tmp_path / "recipe2.yaml"), "--once"]
    done = read_only(tmp_path / "disk", command)
    assert done.returncode == 2 and f"headrace: {tmp_path}/disk/run: Read-only file system" in done.stderr


def test_a_manifest_is_the_same_on_a_disk_and_in_a_bucket(bucket: Store, tmp_path: Path) -> None:
    for number, content in enumerate((b"", b"abc", os.urandom(5000))):
        (tmp_path / "step" / f"{number}").mkdir(parents=True)
        (tmp_path / "step" / f"{number}" / "f").write_bytes(content)
    url = upload(bucket, tmp_path / "step", "step")
    here, there = (
        manifest.seal(manifest.epath.Path(at), step=4, tier="permanent") for at in (tmp_path / "step", url)
    )
    assert here == there
    assert (tmp_path / "step" / manifest.NAME).read_bytes() == files.read(f"{url}/{manifest.NAME}")


@pytest.mark.slow
def test_two_hosts_share_a_run_in_a_bucket_and_a_second_launch_is_refused(
    bucket: Store, tiny, tmp_path: Path, packed: str
) -> None:
    data = upload(bucket, packed, "data")
    for number, how in enumerate(BUSY * 4):
        bucket.fail("run", skip=30 * number, **how)
    cfg = tiny("run_dir=gs://bucket/run", f"data.path={data}", "schedule.steps=400", "mesh.fsdp=2")
    (tmp_path / "both.yaml").write_text(reader.to_yaml(cfg))
    both = hosts_start(tmp_path / "both.yaml")
    while not any("/6/manifest.txt" in name for name in bucket.names("bucket")):
        assert all(process.poll() is None for process in both)
        time.sleep(0.05)
    (tmp_path / "second.yaml").write_text(reader.to_yaml(cfg))
    (code,), output = hosts_finish(hosts_start(tmp_path / "second.yaml", count=1), tmp_path / "second.yaml")
    assert code == 2 and "another process trains in this folder (pid" in output
    both[1].send_signal(signal.SIGTERM)
    codes, output = hosts_finish(both, tmp_path / "both.yaml")
    assert codes == [ExitCode.PREEMPTED] * 2, output
    stopped = max(inventory.step_numbers("gs://bucket/run"))
    assert ".lock" not in " ".join(bucket.names("bucket", "run/"))
    codes, output = hosts_finish(
        hosts_start(tmp_path / "both.yaml", f"schedule.steps={stopped + 3}"), tmp_path / "both.yaml"
    )
    assert codes == [0, 0] and f"from step {stopped} to {stopped + 3}" in output
    assert inventory.find_resume_point("gs://bucket/run").step == stopped + 3
