"""Every command of docs/cloud.md prints what the page shows, in order, against an emulated Google Cloud."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.support import xla_flags
from tests.tpu.test_launch import ROOT, LaunchScenario

# Stands in for Python on the workers. A data disk is a folder of the machine that it is mounted on.
TRAINER = """\
case "$*" in
*"-m headrace train"*) echo "output of the trainer";;
*"-m headrace data"*) exec "{python}" "${{@//\\/mnt/$HOME/mnt}}";;
*) exec "{python}" "$@";;
esac
"""


def examples() -> list[tuple[str, str]]:
    """The commands of the page, each with its expected output."""
    commands = []
    for block in re.findall(r"```console\n(.*?)```", (ROOT / "docs/cloud.md").read_text(), re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            commands.append((command, output))
    return commands


def to_regex(expected: str) -> str:
    """Translate expected output: `...` matches anything within a line, and any lines if alone in one."""
    regex = ""
    for line in expected.splitlines():
        text = re.escape(line).replace(re.escape("HH:MM:SS"), r"\d\d:\d\d:\d\d")
        text = text.replace(re.escape("..."), r"[^\n]*?")
        regex += r"(?:[^\n]*\n)*?" if line == "..." else f"{text}\n"
    return regex


def test_dots_match_within_a_line_or_entire_lines():
    assert re.fullmatch(to_regex("a ... c\n...\nd\n"), "a b c\nx\ny\nd\n")
    assert not re.fullmatch(to_regex("a ... c\n"), "a b\nx c\n")
    assert not re.fullmatch(to_regex("a\n...\nd\n"), "a\nx\n")
    for command, expected in examples():  # each shows more than dots
        assert re.sub(r"[\s.]", "", expected), command


@pytest.fixture
def scenario(tmp_path):
    scenario = LaunchScenario(tmp_path / "story")
    scenario.google.set_trainer_script(TRAINER.format(python=sys.executable))
    scenario.google.buckets["bucket"] = {"location": "US-CENTRAL2"}
    shim = scenario.root / "bin" / "headrace"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headrace "$@"\n')
    shim.chmod(0o755)
    (scenario.root / "recipes").symlink_to(ROOT / "recipes")
    home = scenario.root / "person" / ".ssh"
    home.mkdir(parents=True)
    (home / "id_ed25519").write_text("")
    (home / "id_ed25519.pub").write_text("ssh-ed25519 AAAA somebody\n")
    yield scenario
    scenario.close()


def test_every_command_of_the_page_prints_the_shown_output(scenario):
    env = (
        os.environ | scenario.google.env() | {"PYTHONPATH": str(ROOT), "HOME": str(scenario.root / "person")}
    )
    env |= {"PATH": f"{scenario.root}/bin:{os.environ['PATH']}"}
    env["XLA_FLAGS"] = xla_flags.flags(1)
    commands, failures = examples(), []
    for command, expected in commands:
        process = subprocess.Popen(
            command, shell=True, env=env, cwd=scenario.root, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if " tensorboard " in command:
            wait_for_curves(command)
            os.killpg(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            output = process.stdout.readline()
            process.communicate()
        else:
            output, _ = process.communicate(timeout=240)
        if "--worker all" in command:  # workers print in any order
            output = "".join(sorted(output.splitlines(keepends=True)))
        code = 0 if " tensorboard " in command else process.returncode  # killed above
        if not re.fullmatch(to_regex(expected), output) or code:
            failures.append(f"$ {command}\n{output}\nexited with {code}; expected:\n{expected}")
    assert not failures, "\n".join(failures)
    assert len(commands) >= 25 and scenario.is_nothing_left() and not scenario.google.disks
    check = subprocess.run(["bash", "-n"], input=output, text=True, capture_output=True)
    assert check.returncode == 0, check.stderr


def wait_for_curves(command: str) -> None:
    """Wait until TensorBoard has read the curves."""
    port = command.split()[-1]
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/data/runs", timeout=5) as response:
                if response.read().strip() == b'["."]':
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError("no curves")


def test_the_page_has_a_command_for_every_part():
    commands = " ".join(command for command, _ in examples())
    actions = ["run", "create", "install", "push", "logs", "status", "ssh", "delete", "ls", "export"]
    for action in [*actions, "tensorboard"]:
        assert f"headrace tpu {action} " in f"{commands} ", action
    for action in ("create", "attach", "detach", "delete", "ls"):
        assert f"tpu disk {action}" in commands
