"""Every command of docs/cloud.md does what the page says, one after the other, against a Google Cloud that is
made up."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.support import xla_flags
from tests.tpu.test_launch import ROOT, Story

# A disk is a folder of the machine that it is mounted on.
TRAINER = """\
case "$*" in
*"-m headrace train"*) echo "a trainer says this";;
*"-m headrace data"*) exec "{python}" "${{@//\\/mnt/$HOME/mnt}}";;
*) exec "{python}" "$@";;
esac
"""


def examples() -> list[tuple[str, str]]:
    """Commands and what they should print."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", (ROOT / "docs/cloud.md").read_text(), re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def pattern(expected: str) -> str:
    """`...` stands for anything within a line, and for any lines where it is alone."""
    found = ""
    for line in expected.splitlines():
        text = re.escape(line).replace(re.escape("HH:MM:SS"), r"\d\d:\d\d:\d\d")
        text = text.replace(re.escape("..."), r"[^\n]*?")
        found += r"(?:[^\n]*\n)*?" if line == "..." else f"{text}\n"
    return found


def test_dots_match_within_a_line_or_whole_lines():
    assert re.fullmatch(pattern("a ... c\n...\nd\n"), "a b c\nx\ny\nd\n")
    assert not re.fullmatch(pattern("a ... c\n"), "a b\nx c\n")
    assert not re.fullmatch(pattern("a\n...\nd\n"), "a\nx\n")
    for command, expected in examples():  # something is said of each
        assert re.sub(r"[\s.]", "", expected), command


@pytest.fixture
def story(tmp_path):
    found = Story(tmp_path / "story")
    found.google.python(TRAINER.format(python=sys.executable))
    found.google.buckets["bucket"] = {"location": "US-CENTRAL2"}
    shim = found.root / "bin" / "headrace"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headrace "$@"\n')
    shim.chmod(0o755)
    (found.root / "recipes").symlink_to(ROOT / "recipes")
    home = found.root / "person" / ".ssh"
    home.mkdir(parents=True)
    (home / "id_ed25519").write_text("")
    (home / "id_ed25519.pub").write_text("ssh-ed25519 AAAA somebody\n")
    yield found
    found.close()


def test_every_command_of_the_page_prints_the_shown_output(story):
    env = os.environ | story.google.env() | {"PYTHONPATH": str(ROOT), "HOME": str(story.root / "person")}
    env |= {"PATH": f"{story.root}/bin:{os.environ['PATH']}"}
    env["XLA_FLAGS"] = xla_flags.flags(1)
    done, wrong = 0, []
    for command, expected in examples():
        process = subprocess.Popen(
            command, shell=True, env=env, cwd=story.root, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if " tensorboard " in command:
            look_at(command)
            os.killpg(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            said = process.stdout.readline()
            process.communicate()
        else:
            said, _ = process.communicate(timeout=240)
        if "--worker all" in command:  # whoever is first speaks first
            said = "".join(sorted(said.splitlines(keepends=True)))
        done += 1
        code = 0 if " tensorboard " in command else process.returncode  # that one was ended from here
        if not re.fullmatch(pattern(expected), said) or code:
            wrong.append(f"$ {command}\n{said}\nended with {code}; expected:\n{expected}")
    assert not wrong, "\n".join(wrong)
    assert done >= 25 and story.nothing_left() and not story.google.disks
    check = subprocess.run(["bash", "-n"], input=said, text=True, capture_output=True)
    assert check.returncode == 0, check.stderr


def look_at(command: str) -> None:
    """Until TensorBoard has read the curves."""
    port = command.split()[-1]
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/data/runs", timeout=5) as answer:
                if answer.read().strip() == b'["."]':
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError("no curves")


def test_the_page_has_a_command_for_every_part():
    said = " ".join(command for command, _ in examples())
    acts = ["run", "create", "install", "push", "logs", "status", "ssh", "delete", "ls", "export"]
    for act in [*acts, "tensorboard"]:
        assert f"headrace tpu {act} " in f"{said} ", act
    for act in ("create", "attach", "detach", "delete", "ls"):
        assert f"tpu disk {act}" in said
