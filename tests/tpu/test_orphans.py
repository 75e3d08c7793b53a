"""Whose a slice is, where it is, and how long it has been there: what is forgotten is told, and what another
machine or another person uses is neither named as forgotten nor deleted unasked."""

import signal
import subprocess
import sys
import time

import pytest

from headrace.cli.main import main
from headrace.tpu import cost, job_ledger
from headrace.tpu.request import Request, parse_tpu_slice
from tests.tpu.test_launch import Story, end, hear
from tests.tpu.test_slice_lifecycle import NODE, OURS, SPOT, alive, here

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")

__all__ = ["here"]
THEIRS = SPOT | {"labels": {"headrace": "yes", "headrace-owner": "somebody-else"}}


def deletes(story: Story) -> list[str]:
    return [call[1] for call in story.google.calls if call[0] == "DELETE"]


def old(story: Story, hours: float, **labels: str) -> None:
    told = SPOT | {"labels": {"headrace": "yes", "headrace-seconds": "3600"} | labels}
    story.google.make_node(NODE, told)
    then = time.gmtime(time.time() - hours * 3600)
    story.google.nodes[NODE]["createTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", then)


def test_an_overdue_slice_is_reported_as_an_orphan_even_if_it_is_watched(here, capsys):
    old(here, 59)
    for argv in (["ls"], ["status", "job", *here.key]):
        assert main(["tpu", *argv]) == 0
        assert "59 h old, SHOULD HAVE DELETED ITSELF 58 h AGO" in capsys.readouterr().out
    with job_ledger.watch_lock("project/job"):
        assert main(["tpu", "ls", "--orphans", *here.key]) == 1
        said = capsys.readouterr().out
    assert "job should have deleted itself, costs money; to delete it:" in said
    assert "headrace tpu delete job" in said
    del here.google.nodes[NODE]
    old(here, 59, **{"headrace-owner": "somebody-else"})
    assert main(["tpu", "ls", "--orphans", *here.key]) == 1
    assert "should have deleted itself, costs money and was made by somebody-else" in capsys.readouterr().out
    del here.google.nodes[NODE]
    old(here, 1.1)  # its timer lets a trainer save, and deletes
    assert main(["tpu", "ls"]) == 0
    assert "1.1 h old, deletes itself in 0 min" in capsys.readouterr().out


def test_a_slice_of_another_user_is_no_orphan_and_is_not_deleted_without_force(here, capsys):
    here.google.make_node(NODE, THEIRS)
    assert main(["tpu", "ls", "--orphans", *here.key]) == 0
    said = capsys.readouterr().out
    assert "job" not in said and "1 slice of another user omitted" in said and ": --everybody" in said
    assert main(["tpu", "delete", "job", *here.key]) == 2
    assert "job: created by somebody-else; --force deletes it anyway" in capsys.readouterr().err
    assert not deletes(here) and NODE in here.google.nodes
    assert main(["tpu", "delete", "job", "--force"]) == 0 and here.nothing_left()


def test_orphans_of_everybody_include_slices_of_other_users(here, capsys, monkeypatch):
    here.google.make_node(NODE, THEIRS)
    assert main(["tpu", "ls", "--orphans", "--everybody", *here.key]) == 1
    said = capsys.readouterr().out
    assert "job was made by somebody-else and is not watched from this machine" in said
    assert "omitted" not in said
    assert "  headrace tpu delete job --force\n" in said
    monkeypatch.setenv("HEADRACE_OWNER", "Somebody.Else")
    assert main(["tpu", "ls", "--orphans", *here.key]) == 1
    assert "job is not watched from this machine: `headrace tpu run` adopts it" in capsys.readouterr().out
    assert main(["tpu", "delete", "job", *here.key]) == 0 and here.nothing_left()


def test_disks_have_an_owner_and_are_in_use_by_machines_of_any_kind(here, capsys, monkeypatch):
    zone = ["--zone", "us-central2-b"]
    assert main(["tpu", "disk", "create", "texts", "--size", "9", *zone]) == 0
    monkeypatch.setenv("HEADRACE_OWNER", "nightly")
    capsys.readouterr()
    assert main(["tpu", "ls", "--orphans"]) == 0
    omitted = "1 disk of another user omitted, since you are nightly: --everybody shows all\n"
    assert capsys.readouterr().out == omitted
    assert main(["tpu", "disk", "delete", "texts", *zone]) == 2 and "texts" in here.google.disks
    assert "--force deletes it anyway" in capsys.readouterr().err
    assert main(["tpu", "ls", "--orphans", "--everybody", "--project", "project"]) == 0
    said = capsys.readouterr().out
    assert "no slice uses the disk texts (9 GB in us-central2-b, made by " in said
    assert "  headrace tpu disk delete texts --project project --zone us-central2-b --force\n" in said
    here.google.disks["texts"]["users"] = ["projects/project/zones/us-central2-b/instances/vm"]
    assert main(["tpu", "ls", "--orphans", "--everybody"]) == 0 and not capsys.readouterr().out
    assert main(["tpu", "disk", "delete", "texts", "--force", *zone]) == 0 and not here.google.disks


def test_a_slice_that_is_being_repaired_is_not_deleted_without_force(here, capsys):
    here.google.make_node(NODE, OURS)
    here.google.nodes[NODE]["state"] = "REPAIRING"
    assert main(["tpu", "delete", "job", *here.key]) == 2 and NODE in here.google.nodes
    assert "job: found it REPAIRING, and its workers cannot be reached" in capsys.readouterr().err
    here.google.nodes[NODE]["state"] = "CREATING"  # nothing was ever on it
    assert main(["tpu", "delete", "job", *here.key]) == 0 and here.nothing_left()


def test_the_status_of_a_stopped_slice_says_what_happens_after_a_start(here, capsys):
    for hours, says in (
        (0.5, "its hours end in 30 min; started later, it deletes itself"),
        (9, "its hours are used up; if it is started, it"),
    ):
        old(here, hours)
        here.google.nodes[NODE]["state"] = "STOPPED"
        assert main(["tpu", "status", "job", *here.key]) == 0
        said = capsys.readouterr().out
        assert says in said and "deletes itself in" not in said and "SHOULD" not in said
        here.google.nodes.clear()
        here.google.made = 9  # other machines


def test_a_user_without_a_name_gets_advice(here, capsys, monkeypatch):
    here.google.make_node(NODE, THEIRS)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987654)
    assert main(["tpu", "status", "job", *here.key]) == 2
    assert "set USER or LOGNAME" in capsys.readouterr().err


def test_a_command_on_a_worker_ends_with_ctrl_c(here):
    here.google.make_node(NODE, OURS)
    process = here.start("ssh", "job", *here.key, "--", "echo here; sleep 60")
    hear(process, "[w0] here")
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert end(process)[0] == 130 and time.monotonic() - begun < 30


def test_a_training_followed_from_another_machine_saves_before_the_slice_is_deleted(
    here, capsys, monkeypatch
):
    pids = here.trains_alone()
    monkeypatch.setenv("HEADRACE_HOME", str(here.root / "another-machine"))
    assert main(["tpu", "ls", "--orphans", *here.key]) == 0
    said = capsys.readouterr().out
    assert "job is training; if no other machine of yours watches it" in said and "tpu delete" not in said
    here.google.block()
    assert main(["tpu", "delete", "job", *here.key]) == 2  # nobody knows, so nobody decides
    reason = "job: cannot check whether anything trains there, since its workers do not respond (ssh: connect"
    assert reason in capsys.readouterr().err
    assert main(["tpu", "delete", "job", "--ssh-key", "none"]) == 2
    assert alive(pids) == [True, True] and not deletes(here)
    for file in here.root.glob("machines/*/blocked"):
        file.unlink()
    assert main(["tpu", "delete", "job", *here.key]) == 0
    assert "job: waiting for the trainer to save\ndeleting job\n" in capsys.readouterr().out
    assert here.nothing_left()
    logs = [file.read_text() for file in here.root.glob("machines/*/home/user/.headrace/jobs/job/log")]
    assert len(logs) == 2 and all(log.endswith("saved\n") for log in logs)


def test_a_training_of_another_user_is_found_on_a_slice_without_owner(here, capsys):
    here.google.make_node(NODE, OURS)
    (machine,) = [place for place in here.root.glob("machines/*") if place.name.endswith(".1")]
    recipe = machine / "home/other/.headrace/jobs/theirs/recipe.yaml"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(recipe)]) as process:
        assert main(["tpu", "delete", "job", *here.key]) == 2
        said = capsys.readouterr().err
        assert f"job: found another training there ({recipe}); --force deletes it anyway" in said
        assert main(["tpu", "ls", "--orphans", *here.key]) == 0
        assert "job is training" in capsys.readouterr().out and NODE in here.google.nodes
        process.kill()
    assert main(["tpu", "delete", "job", *here.key]) == 0 and here.nothing_left()


def test_a_trainer_that_does_not_end_is_deleted_with_the_slice(here, capsys):
    here.trainer("wait wait")
    text = (here.root / "python").read_text()
    here.google.python(text.partition("\n")[2].replace("echo saved; exit 75", "true"))
    process = here.launch()
    here.until(here.training)
    process.kill()
    process.communicate()
    assert main(["tpu", "delete", "job", *here.key]) == 0 and here.nothing_left()
    assert "the trainer has not ended within 2 s" in capsys.readouterr().out


def test_a_job_is_identified_by_project_and_name(here, capsys, monkeypatch):
    here.google.make_node(NODE, OURS)
    for scope, code in (("local", 1), ("other-project", 1), ("project", 0)):
        with job_ledger.watch_lock(f"{scope}/job"):  # by a run of it
            assert main(["tpu", "ls", "--orphans", *here.key]) == code, scope
            assert ("job is not watched from this machine" in capsys.readouterr().out) == bool(code)
    with job_ledger.watch_lock("project/job"):
        assert main(["tpu", "ls", "--orphans", "--project", "other-project", *here.key]) == 1
    here.google.nodes.clear()
    job_ledger.JobLedger("other-project/job", "").record("us-west4-a", 1.0, 2.0)
    assert here.run() == 0
    asked = [call[1] for call in here.google.calls if call[1].endswith("/queuedResources")]
    assert not [path for path in asked if "us-west4-a" in path]
    assert job_ledger.JobLedger("other-project/job").attempts
    assert (here.root / "launcher/tpu/project/job/w0.log").exists()


def test_a_slice_that_is_made_has_its_own_hours(here, capsys):
    argv = ["tpu", "create", "--slice", "v4-16", "--name", "mine", "--zone", "us-central2-b", *here.key]
    now, ledger = time.time(), job_ledger.JobLedger("project/mine", "")
    ledger.record("us-central2-b", now - 30 * 3600, now - 27 * 3600, 3 * 3600)  # yesterday
    assert main([*argv, "--max-hours", "4"]) == 0
    (node,) = here.google.nodes.values()
    assert abs(int(node["metadata"]["headrace-seconds"]) - 4 * 3600) < 60
    created = job_ledger.JobLedger("project/mine").attempts[-1]["created"]
    assert main([*argv, "--max-hours", "4"]) == 0  # it is there: its hours go on
    assert [life["created"] for life in job_ledger.JobLedger("project/mine").attempts] == [created]


@pytest.mark.parametrize("act", ["ls", "create", "attach", "detach", "delete"])
def test_disk_commands_have_no_local_platform(here, capsys, act):
    here.google.disks["x"] = {"name": "x", "labels": {"headrace": "yes"}}
    more = {"ls": [], "create": ["x", "--size", "1"], "delete": ["x"]}
    argv = more.get(act, ["x", "--to" if act == "attach" else "--from", "job"])
    assert main(["tpu", "disk", act, *argv, "--zone", "us-central2-b", "--platform", "local"]) == 2
    assert "unrecognized arguments: --platform" in capsys.readouterr().err and "x" in here.google.disks
    assert not here.google.calls


def test_a_limit_in_dollars_needs_a_known_price(tmp_path):
    def asked(*zones: str, **more) -> Request:
        return Request("job", parse_tpu_slice("v5p-8", ""), zones, **more)

    budget = cost.make_budget(asked("us-central1-a"), None, 100.0, None)
    assert budget.dollars_per_hour == pytest.approx(4 * 4.78)
    with pytest.raises(cost.UserError, match="and europe-west4-b may cost more; give its price with"):
        cost.make_budget(asked("us-central1-a", "europe-west4-b"), None, 100.0, None)
    assert cost.make_budget(asked("europe-west4-b"), 3.0, None, None).hours == 3.0
    file = tmp_path / "prices.yaml"
    file.write_text("V5p: {on_demand: 5.0}\n")
    assert cost.make_budget(asked("europe-west4-b"), None, 100.0, file).hours == pytest.approx(5.0)
    with pytest.raises(cost.UserError, match=r"v5p: {spot: DOLLARS}"):
        cost.make_budget(asked("europe-west4-b", terms="spot"), None, 100.0, file)
    said = cost.format_cost(asked("europe-west4-b"), cost.Budget(3.0, 1.0), is_user_price=False)
    assert "the highest in the US, not in every requested zone" in said
    assert cost.has_user_price(asked("europe-west4-b"), file) and not cost.has_user_price(
        asked("x", terms="spot"), file
    )


def test_a_slice_found_outside_the_us_does_not_pass_a_limit_in_dollars(here, capsys):
    there = NODE.replace("us-central2-b", "europe-west4-b")
    here.google.make_node(there, OURS)
    job_ledger.JobLedger("project/job").record("europe-west4-b", 1.0, 2.0)
    assert here.run("--max-cost", "100") == 2
    assert "europe-west4-b may cost more" in capsys.readouterr().err
    assert there in here.google.nodes and not here.created()
