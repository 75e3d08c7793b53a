"""The doctor: each check with a fake environment, and the full command."""

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from headrace.cli import main as cli_main
from headrace.doctor import devices, gce, report
from headrace.doctor import machine as doctor_machine
from headrace.doctor.report import CheckResult
from headrace.storage import files
from tests.support.fake_gcs import Store, running


class Metadata(BaseHTTPRequestHandler):
    values: dict[str, str] = {}
    ahead = 0.0

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        found = self.values.get(self.path.removeprefix("/computeMetadata/v1/instance/"))
        self.send_response_only(200 if found and self.headers["Metadata-Flavor"] == "Google" else 404)
        self.send_header("Date", formatdate(time.time() + self.ahead, usegmt=True))
        self.send_header("Metadata-Flavor", "Google")
        self.end_headers()
        self.wfile.write((found or "").encode())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Metadata]]:
    """A virtual machine's metadata server."""
    kind = type("Mine", (Metadata,), {"values": {"zone": "projects/1/zones/us-central2-b"}})
    server = HTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    yield kind
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with running("bucket", location="US-CENTRAL2") as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        files.prepare_gcsfs()
        monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=_no_wait))
        monkeypatch.setattr(files, "FIRST_WAIT", 0.01)
        yield store


async def _no_wait(seconds: float) -> None:
    pass


def states(lines: Any) -> list[str]:
    return [line.state for line in lines]


@pytest.mark.parametrize(
    ("location", "state"),
    [
        ("US-CENTRAL2", "ok"),
        ("US", "warn"),
        ("EU", "fail"),
        ("EUROPE-WEST4", "fail"),
        ("US-CENTRAL1", "fail"),
    ],
)
def test_a_bucket_in_another_region_is_reported(
    machine: type[Metadata], bucket: Store, tiny, location: str, state: str
) -> None:
    bucket.locations["bucket"] = location
    where = gce.Instance.find()
    assert where is not None and where.zone == "us-central2-b" and where.region == "us-central2"
    (line,) = gce.check_regions(tiny("run_dir=gs://bucket/x"), where)
    assert line.state == state and f"is in {location.lower()}, this machine in us-central2-b" in line.message
    assert ("--location=us-central2" in line.fix) == (state != "ok")


def test_a_bucket_with_soft_delete_is_reported(bucket: Store, tiny) -> None:
    cfg = tiny("run_dir=gs://bucket/x")
    assert states(gce.check_soft_delete(cfg)) == ["ok"] and gce.check_soft_delete(tiny()) == []
    bucket.soft_delete = 604_800  # the default of new buckets
    (line,) = gce.check_soft_delete(cfg)
    assert line.state == "warn" and "for 7 days" in line.message and "--clear-soft-delete" in line.fix


def test_an_unknown_location_of_a_bucket_is_a_warning(machine: type[Metadata], bucket: Store, tiny) -> None:
    bucket.fail("GET /storage/v1/b/bucket", status=403, times=9)
    (line,) = gce.check_regions(tiny("run_dir=gs://bucket/x"), gce.Instance.find())
    assert line.state == "warn" and "its location is unknown" in line.message


def test_a_missing_metadata_server_costs_no_time(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen()  # takes connections and says nothing
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{silent.getsockname()[1]}")
    started = time.perf_counter()
    assert gce.Instance.find() is None
    assert time.perf_counter() - started < 2
    silent.close()
    assert states(gce.check_regions(tiny("run_dir=gs://bucket/x"), None)) == ["warn"]
    assert gce.check_regions(tiny(), None) == []


@pytest.mark.parametrize(("ahead", "state"), [(0, "ok"), (20, "warn"), (-20, "warn"), (-3600, "fail")])
def test_a_wrong_clock_is_reported(
    machine: type[Metadata], bucket: Store, tiny, ahead: float, state: str
) -> None:
    machine.ahead = bucket.clock = ahead
    where = gce.Instance.find()
    for cfg in (None, tiny("run_dir=gs://bucket/x")):
        (line,) = gce.check_clock(cfg, where)
        assert line.state == state
        assert state == "ok" or ("behind" if ahead > 0 else "ahead of") in line.message
    assert states(gce.check_clock(None, None)) == ["ok"]


def test_mismatched_versions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor_machine.find_version
    made_up: dict[str, str | None] = {}
    monkeypatch.setattr(doctor_machine, "find_version", lambda name: made_up.get(name, real(name)))
    monkeypatch.setattr(doctor_machine.metadata, "requires", lambda name: REQUIRED.get(name, []))
    made_up |= {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1", "headrace": "1", "numpy": "2.1"}
    made_up |= {"jax-cuda12-plugin": None, "jax-cuda13-plugin": None}
    (line,) = doctor_machine.check_versions()
    assert line.state == "ok" and "jax 0.10.2, jaxlib 0.10.2, libtpu 0.0.42.1" in line.message
    made_up |= {"jaxlib": "0.10.0", "libtpu": "0.0.40", "numpy": "1.26"}
    found = doctor_machine.check_versions()
    assert states(found) == ["fail", "warn", "fail"]
    assert [line.fix for line in found] == [
        "pip install jax==0.10.2 jaxlib==0.10.2",
        'pip install "libtpu==0.0.42.*"',
        'pip install "numpy>=2"',
    ]
    made_up["numpy"] = None
    assert "found no numpy" in doctor_machine.check_versions()[-1].message


REQUIRED = {
    "jax": ['libtpu==0.0.42.*; extra == "tpu"', 'jax-cuda13-plugin<=0.10.2,>=0.10.2; extra == "cuda13"'],
    "headrace": ["numpy>=2", 'gcsfs>=2025; extra == "gcs"'],
}


def fake_smi(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_an_old_or_broken_gpu_driver_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_machine, "find_version", lambda name: "0.10.2" if name == "jax-cuda13-plugin" else None
    )
    fake_smi(tmp_path, "NVIDIA H200, 143771 MiB, 580.82.07", monkeypatch)
    assert doctor_machine.check_driver() == [
        CheckResult("ok", "driver", "580.82.07 for 1 x NVIDIA H200 (143771 MiB each)")
    ]
    assert devices.has_gpu()
    fake_smi(tmp_path, "NVIDIA H200, 143771 MiB, 570.10", monkeypatch)
    (line,) = doctor_machine.check_driver()
    assert line.state == "fail" and "jax-cuda13-plugin needs 580 or newer" in line.message
    fake_smi(tmp_path, "NVIDIA-SMI has failed", monkeypatch, code=9)
    (line,) = doctor_machine.check_driver()
    assert line.state == "fail" and "NVIDIA-SMI has failed" in line.message


def test_low_limits_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    found = doctor_machine.check_limits()
    assert states(found) == ["warn", "warn"]
    assert found[0].fix == "ulimit -n 4096" and "64.0 MiB free in /dev/shm" in found[1].message


def test_a_used_port_and_an_unknown_host_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(doctor_machine, "DEFAULT_PORT", port)
        assert states(doctor_machine.check_port()) == ["warn"]  # a single process does not need the port
        monkeypatch.setenv("HEADRACE_COORDINATOR", f"127.0.0.1:{port}")
        (line,) = doctor_machine.check_port()
        assert line.state == "fail"
        assert f"{port}, where other hosts connect: Address already in use" in line.message
    assert states(doctor_machine.check_port()) == ["ok"]
    monkeypatch.setenv("HEADRACE_PROCESS", "1")
    assert states(doctor_machine.check_port()) == ["ok"]
    monkeypatch.setattr(doctor_machine.socket, "getaddrinfo", _unknown)
    assert states(doctor_machine.check_port()) == ["fail"]
    monkeypatch.setenv("HEADRACE_COORDINATOR", "nonsense")
    assert states(doctor_machine.check_port()) == ["fail"]


def _unknown(*args: Any) -> None:
    raise socket.gaierror(-2, "Name or service not known")


def test_folders_without_access_are_reported(
    bucket: Store, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    assert states(doctor_machine.check_folders(tiny())) == ["ok", "ok"]
    (tmp_path / "file").write_text("")
    assert doctor_machine.check_writable(f"{tmp_path}/file/run").state == "fail"
    assert doctor_machine.check_writable("gs://bucket/run").state == "ok" and bucket.names("bucket") == []
    assert "there is no bucket nowhere" in doctor_machine.check_writable("gs://nowhere/run").message
    assert doctor_machine.check_writable("s3://bucket/run").state == "fail"
    bucket.fail("POST", status=403, times=9)
    assert (
        "may not be written" in (line := doctor_machine.check_writable("gs://bucket/run")).message
        and "roles/" in line.fix
    )
    assert doctor_machine.check_data(f"{tmp_path}/nothing").state == "fail"
    found = doctor_machine.check_folders(tiny("data.path=gs://bucket/data"))
    assert [line.topic for line in found] == ["run", "data", "cache"] and found[1].state == "fail"


def test_disk_space_is_compared_with_the_size_of_checkpoints(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny("checkpoint.keep=3")
    monkeypatch.setattr(devices.shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000))
    for takes, state in ((2_000, "ok"), (4_000, "warn"), (11_000, "fail"), (None, "warn")):
        assert states(devices.check_disk(cfg, takes)) == [state]
    assert states(devices.check_disk(tiny("run_dir=gs://bucket/x"), 11_000)) == ["ok"]
    # float32 weights, AdamW's two moments and its count
    assert devices.estimate_checkpoint_bytes(cfg) == 28_192 * 12 + 4


def test_an_accelerator_that_jax_does_not_see_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(platform="cpu", kind="cpu", count=1, local=1, processes=1)
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    assert devices.check_platform(found, None).state == "warn"
    tpu = gce.Instance("us-central2-b", "v4-8", None)
    line = devices.check_platform(found, tpu)
    assert line.state == "fail" and "headrace[tpu]" in line.fix
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    assert "headrace[gpu]" in devices.check_platform(found, None).fix
    found |= dict(platform="tpu", kind="TPU v4", count=16, local=4, processes=4)
    assert devices.check_platform(found, tpu).message == "16 x TPU v4, 4 of them on this host of 4"


def test_devices_that_hang_or_are_in_use_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*args: Any, **kwargs: Any) -> None:
        raise subprocess.TimeoutExpired("x", 1)

    monkeypatch.setattr(devices.subprocess, "run", hangs)
    assert states(devices.check_devices(None, None, [], None)) == ["fail"]
    result = SimpleNamespace(returncode=1, stdout="", stderr="a\nThe TPU is already in use by process 7")
    monkeypatch.setattr(devices.subprocess, "run", lambda *args, **kwargs: result)
    (line,) = devices.check_devices(None, None, [], None)
    assert line.state == "fail" and "lsof" in line.fix


def test_a_check_that_raises_is_a_warning() -> None:
    def broken() -> Any:
        raise ZeroDivisionError("by zero")

    assert report.run_check("broken", broken) == [
        CheckResult("warn", "broken", "the check failed: ZeroDivisionError: by zero")
    ]


def test_doctor_prints_fixes_and_exits_with_1_if_a_check_fails(
    tiny, tmp_path: Path, machine: type[Metadata], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny()
    assert cli_main.main(["doctor", str(tmp_path / "recipe.yaml")]) == 0
    output = capsys.readouterr().out
    assert "a checkpoint takes" in output and "us-central2-b" in output and " 0 fail" in output
    assert cli_main.main(["doctor", str(tmp_path / "recipe.yaml"), f"data.path={tmp_path}/nothing"]) == 1
    assert "no packed data in" in " ".join(capsys.readouterr().out.split())
    assert cli_main.main(["doctor", "nothing.yaml"]) == 2


@pytest.mark.slow
def test_doctor_is_quick_without_a_recipe() -> None:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "headrace", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.perf_counter() - started < 20
