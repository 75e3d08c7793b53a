"""The real gcloud, if installed, accepts the commands that --dry-run prints, and sends the same requests."""

import os
import re
import shlex
import shutil
import subprocess

import pytest

from tests.tpu.test_launch import LaunchScenario

pytestmark = pytest.mark.skipif(shutil.which("gcloud") is None, reason="needs gcloud")


@pytest.fixture
def scenario(tmp_path):
    scenario = LaunchScenario(tmp_path / "story")
    scenario.google.disks["texts"] = {"name": "texts"}
    yield scenario
    scenario.close()


def gcloud(scenario: LaunchScenario, command: list[str]) -> str:
    env = os.environ | scenario.google.env() | {"CLOUDSDK_CONFIG": str(scenario.root / "gcloud")}
    env |= {"CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true", "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    env.pop("PYTHONPATH", None)
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--slice", "v4-16", "--spot", "--max-hours", "5"],
        ["--slice", "2xv5e-16", "--disk", "texts", "--internal-ips"],
        pytest.param(["--slice", "v6e-8", "--reserved"], marks=pytest.mark.slow),
    ],
)
def test_gcloud_requests_the_same_slice_as_the_launcher(scenario, options):
    common_options = ["--name", "job", "--zone", "us-central2-b"]
    code, output = scenario.run_command("create", *options, *common_options, "--dry-run")
    assert code == 0, output
    gcloud(scenario, [*shlex.split(output[output.index("gcloud compute") :]), "--async"])
    gcloud_request = next(call[3] for call in scenario.google.calls if call[0] == "POST")
    scenario.google.queued.clear()
    scenario.google.calls.clear()
    code, output = scenario.run_command(
        "create", *options, *common_options, "--ssh-key", str(scenario.root / "key")
    )
    assert code == 0, output
    launcher_request = next(call[3] for call in scenario.google.calls if call[0] == "POST")
    launcher_request["tpu"]["nodeSpec"][0]["node"]["metadata"].pop(
        "ssh-keys"
    )  # gcloud sends its keys with its first ssh
    assert normalize_request(launcher_request) == normalize_request(gcloud_request)


SECTIONS = re.compile(r"(?:^|until )gcloud compute", re.M)


def normalize_request(tree):
    """Remove values without effect, and replace enum numbers by names."""
    if isinstance(tree, dict):
        named = {key: "READ_ONLY" if key == "mode" and value == 2 else value for key, value in tree.items()}
        return {key: normalize_request(value) for key, value in named.items() if value is not False}
    return [normalize_request(item) for item in tree] if isinstance(tree, list) else tree


def test_the_commands_that_a_dry_run_prints_run_the_job_manually(scenario):
    options = ["--slice", "v4-16", "--name", "job", "--zone", "us-central2-b", "--dry-run"]
    code, output = scenario.run_command("run", *options, "recipe.yaml")
    assert code == 0, output
    commands = [shlex.split("gcloud compute" + text) for text in SECTIONS.split(output)[1:]]
    assert [command[3:5] for command in commands] == [
        ["queued-resources", "create"],
        ["queued-resources", "describe"],
        *[["tpu-vm", "scp"], ["tpu-vm", "ssh"]] * 2,
        ["tpu-vm", "ssh"],
        ["queued-resources", "delete"],
    ]
    create, describe, *_, delete = commands
    gcloud(scenario, [*create, "--async"])
    assert len(scenario.google.queued) == 1
    scenario.wait_until(lambda: gcloud(scenario, describe[: describe.index("|")]) == "ACTIVE\n")
    gcloud(scenario, [*delete, "--async"])
    scenario.wait_until(scenario.is_nothing_left)
