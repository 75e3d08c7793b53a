"""Machines that are folders of this one: what stands for ssh, uv and root's commands there, and how one is
switched off."""

import contextlib
import os
import signal
import socket
from pathlib import Path

# What stands for ssh: goes to the folder that the address names, unless the machine is gone.
SSH = """\
#!{python} -IS
import os, subprocess, sys, time
target = next(word for word in sys.argv if "@127." in word).partition("@")[2]
place = os.path.realpath(os.path.join("{root}", "machines", target))
log = open("{root}/ssh.log", "a")
print(" ".join(sys.argv[1:])[:20000], file=log, flush=True)
def there(name):
    return os.path.exists(os.path.join(place, name))
if there("denied"):
    print("user@" + target + ": Permission denied (publickey).", file=sys.stderr)
    sys.exit(255)
if there("off") or there("blocked") or not os.path.isdir(place):
    print("ssh: connect to host " + target + ": Connection refused", file=sys.stderr)
    sys.exit(255)
if there("hung"):  # lets everybody in, and nothing ends there
    time.sleep(60)
    sys.exit(255)
env = dict(os.environ)
for line in open(os.path.join(place, "env")):
    name, _, value = line.rstrip("\\n").partition("=")
    env[name] = value
env["HOME"] = os.path.join(place, "home", "user")
env["PATH"] = "{root}/machine:" + env["PATH"]
env["HEADRACE_TIMER_PLACE"] = place
env["HEADRACE_TIMER_HOMES"] = os.path.join(place, "home")
for name in ("HEADRACE_HOME", "HEADRACE_POLL", "HEADRACE_PATIENCE"):
    env.pop(name, None)
script = sys.argv[-1]
if " follow " in script and there("drop"):  # the connection breaks after a few lines
    os.unlink(os.path.join(place, "drop"))
    script = "(" + script + ") | head -c 30; exit 255"
code = subprocess.call(["bash", "-c", script], env=env, cwd=env["HOME"])
sys.exit(255 if there("off") or code < 0 else code)  # a machine that goes away takes the connection with it
"""

# What stands for uv: an environment whose Python is this one, or whatever a test puts in its place.
UV = """\
#!/bin/sh
echo "$@" >> "{root}/uv.log"
if [ "$1" = venv ]; then
  for last; do :; done
  mkdir -p "$last/bin"
  printf '#!/bin/sh\\nexec "{root}/python" "$@"\\n' > "$last/bin/python"
  chmod +x "$last/bin/python"
elif [ -e "{root}/install" ]; then
  . "{root}/install"
fi
"""


# What stands for root's commands: disks are never mounted.
SUDO = """\
#!/bin/sh
echo "$@" >> "{root}/sudo.log"
"""
MOUNTPOINT = "#!/bin/sh\nexit 1\n"
# What stands for systemd: keeps the one unit alive that it is told of, as the unit wants it.
SYSTEMCTL = """\
#!/bin/bash
unit="$HEADRACE_TIMER_UNITS/headrace-timer.service"
[ "$*" = "restart headrace-timer" ] || exit 0
grep -qx 'Restart=always' "$unit" || exit 1
command=$(sed -n 's/^ExecStart=//p' "$unit")
(while [ -e "$unit" ]; do $command; sleep 0.05; done) > /dev/null 2>&1 < /dev/null &
"""
SCRIPTS = {
    "machine/systemctl": SYSTEMCTL,
    "ssh": SSH,
    "bin/uv": UV,
    "machine/sudo": SUDO,
    "machine/mountpoint": MOUNTPOINT,
}


def end_processes(place: Path) -> None:
    """All of a machine, which are told by a variable that they have from it, and its startup script."""
    mark, script = f"HEADRACE_TIMER_PLACE={place}".encode(), f"{place}/startup".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            told = (process / "environ").read_bytes() + b"\0" + (process / "cmdline").read_bytes()
            if {mark, script} & set(told.split(b"\0")):
                os.kill(int(process.name), signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
