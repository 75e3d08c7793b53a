"""What --dry-run prints is accepted by the real gcloud, where there is one, and asks Google for the same."""

import os
import re
import shlex
import shutil
import subprocess

import pytest

from tests.tpu.test_launch import Story

pytestmark = pytest.mark.skipif(shutil.which("gcloud") is None, reason="needs gcloud")


@pytest.fixture
def story(tmp_path):
    found = Story(tmp_path / "story")
    found.google.disks["texts"] = {"name": "texts"}
    yield found
    found.close()


def gcloud(story: Story, command: list[str]) -> str:
    env = os.environ | story.google.env() | {"CLOUDSDK_CONFIG": str(story.root / "gcloud")}
    env |= {"CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true", "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--slice", "v4-16", "--spot", "--max-hours", "5"],
        ["--slice", "2xv5e-16", "--disk", "texts", "--internal-ips"],
        pytest.param(["--slice", "v6e-8", "--reserved"], marks=pytest.mark.slow),
    ],
)
def test_gcloud_asks_for_the_slice_that_the_launcher_asks_for(story, options):
    more = ["--name", "job", "--zone", "us-central2-b"]
    code, said = story.call("create", *options, *more, "--dry-run")
    assert code == 0, said
    gcloud(story, [*shlex.split(said[said.index("gcloud compute") :]), "--async"])
    theirs = next(call[3] for call in story.google.calls if call[0] == "POST")
    story.google.queued.clear()
    story.google.calls.clear()
    code, said = story.call("create", *options, *more, "--ssh-key", str(story.root / "key"))
    assert code == 0, said
    ours = next(call[3] for call in story.google.calls if call[0] == "POST")
    ours["tpu"]["nodeSpec"][0]["node"]["metadata"].pop("ssh-keys")  # gcloud sends its own, with its first ssh
    assert plain(ours) == plain(theirs)


SECTIONS = re.compile(r"(?:^|until )gcloud compute", re.M)


def plain(tree):
    """Without what means nothing, and with names for what the other gives by number."""
    if isinstance(tree, dict):
        named = {key: "READ_ONLY" if key == "mode" and value == 2 else value for key, value in tree.items()}
        return {key: plain(value) for key, value in named.items() if value is not False}
    return [plain(one) for one in tree] if isinstance(tree, list) else tree


def test_the_commands_that_a_dry_run_prints_do_the_job_by_hand(story):
    more = ["--slice", "v4-16", "--name", "job", "--zone", "us-central2-b", "--dry-run"]
    code, said = story.call("run", *more, "recipe.yaml")
    assert code == 0, said
    commands = [shlex.split("gcloud compute" + text) for text in SECTIONS.split(said)[1:]]
    assert [command[3:5] for command in commands] == [
        ["queued-resources", "create"],
        ["queued-resources", "describe"],
        *[["tpu-vm", "scp"], ["tpu-vm", "ssh"]] * 2,
        ["tpu-vm", "ssh"],
        ["queued-resources", "delete"],
    ]
    create, describe, *_, delete = commands
    gcloud(story, [*create, "--async"])
    assert len(story.google.queued) == 1
    story.until(lambda: gcloud(story, describe[: describe.index("|")]) == "ACTIVE\n")
    gcloud(story, [*delete, "--async"])
    story.until(story.nothing_left)
