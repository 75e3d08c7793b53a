"""Fake machines that are folders of this machine: scripts instead of ssh, uv and root's commands, and the
end of all processes of a machine."""

import contextlib
import os
import signal
import socket
from pathlib import Path

# A fake ssh: runs commands in the folder named by the address, unless the machine is gone.
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
if there("hung"):  # accepts connections, but no command ends
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

# A fake uv: an environment with this Python, or with the script of a test in its place.
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


# Fakes of root's commands: disks are never mounted.
SUDO = """\
#!/bin/sh
echo "$@" >> "{root}/sudo.log"
"""
MOUNTPOINT = "#!/bin/sh\nexit 1\n"
# A fake systemd: restarts the timer unit whenever it ends, if the unit says so.
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
    """Kill all processes of a machine: those with its environment variable, and its startup script."""
    variable, script = f"HEADRACE_TIMER_PLACE={place}".encode(), f"{place}/startup".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment_and_command = (
                (process / "environ").read_bytes() + b"\0" + (process / "cmdline").read_bytes()
            )
            if {variable, script} & set(environment_and_command.split(b"\0")):
                os.kill(int(process.name), signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
