"""Owners, zones and ages of slices: forgotten slices are reported, and slices in use by another machine or
another user are neither reported as forgotten nor deleted without --force."""

import signal
import subprocess
import sys
import time

import pytest

from headrace.cli.main import main
from headrace.tpu import cost, job_ledger
from headrace.tpu.request import Request, parse_tpu_slice
from tests.tpu.test_launch import LaunchScenario, read_until, wait_for_exit
from tests.tpu.test_slice_lifecycle import HEADRACE, NODE, SPOT, are_alive, scenario

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")

__all__ = ["scenario"]
FOREIGN_OWNER = SPOT | {"labels": {"headrace": "yes", "headrace-owner": "somebody-else"}}


def deleted_paths(scenario: LaunchScenario) -> list[str]:
    return [call[1] for call in scenario.google.calls if call[0] == "DELETE"]


def make_old_slice(scenario: LaunchScenario, hours: float, **labels: str) -> None:
    config = SPOT | {"labels": {"headrace": "yes", "headrace-seconds": "3600"} | labels}
    scenario.google.make_node(NODE, config)
    created = time.gmtime(time.time() - hours * 3600)
    scenario.google.nodes[NODE]["createTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", created)


def test_an_overdue_slice_is_reported_as_an_orphan_even_if_it_is_watched(scenario, capsys):
    make_old_slice(scenario, 59)
    for argv in (["ls"], ["status", "job", *scenario.key]):
        assert main(["tpu", *argv]) == 0
        assert "59 h old, SHOULD HAVE DELETED ITSELF 58 h AGO" in capsys.readouterr().out
    with job_ledger.watch_lock("project/job"):
        assert main(["tpu", "ls", "--orphans", *scenario.key]) == 1
        output = capsys.readouterr().out
    assert "job should have deleted itself, costs money; to delete it:" in output
    assert "headrace tpu delete job" in output
    del scenario.google.nodes[NODE]
    make_old_slice(scenario, 59, **{"headrace-owner": "somebody-else"})
    assert main(["tpu", "ls", "--orphans", *scenario.key]) == 1
    assert "should have deleted itself, costs money and was made by somebody-else" in capsys.readouterr().out
    del scenario.google.nodes[NODE]
    make_old_slice(scenario, 1.1)  # the timer lets the trainer save, then deletes the slice
    assert main(["tpu", "ls"]) == 0
    assert "1.1 h old, deletes itself in 0 min" in capsys.readouterr().out


def test_a_slice_of_another_user_is_no_orphan_and_is_not_deleted_without_force(scenario, capsys):
    scenario.google.make_node(NODE, FOREIGN_OWNER)
    assert main(["tpu", "ls", "--orphans", *scenario.key]) == 0
    output = capsys.readouterr().out
    assert "job" not in output and "1 slice of another user omitted" in output and ": --everybody" in output
    assert main(["tpu", "delete", "job", *scenario.key]) == 2
    assert "job: created by somebody-else; --force deletes it anyway" in capsys.readouterr().err
    assert not deleted_paths(scenario) and NODE in scenario.google.nodes
    assert main(["tpu", "delete", "job", "--force"]) == 0 and scenario.is_nothing_left()


def test_orphans_of_everybody_include_slices_of_other_users(scenario, capsys, monkeypatch):
    scenario.google.make_node(NODE, FOREIGN_OWNER)
    assert main(["tpu", "ls", "--orphans", "--everybody", *scenario.key]) == 1
    output = capsys.readouterr().out
    assert "job was made by somebody-else and is not watched from this machine" in output
    assert "omitted" not in output
    assert "  headrace tpu delete job --force\n" in output
    monkeypatch.setenv("HEADRACE_OWNER", "Somebody.Else")
    assert main(["tpu", "ls", "--orphans", *scenario.key]) == 1
    assert "job is not watched from this machine: `headrace tpu run` adopts it" in capsys.readouterr().out
    assert main(["tpu", "delete", "job", *scenario.key]) == 0 and scenario.is_nothing_left()


def test_disks_have_an_owner_and_are_in_use_by_machines_of_any_kind(scenario, capsys, monkeypatch):
    zone = ["--zone", "us-central2-b"]
    assert main(["tpu", "disk", "create", "texts", "--size", "9", *zone]) == 0
    monkeypatch.setenv("HEADRACE_OWNER", "nightly")
    capsys.readouterr()
    assert main(["tpu", "ls", "--orphans"]) == 0
    omitted = "1 disk of another user omitted, since you are nightly: --everybody shows all\n"
    assert capsys.readouterr().out == omitted
    assert main(["tpu", "disk", "delete", "texts", *zone]) == 2 and "texts" in scenario.google.disks
    assert "--force deletes it anyway" in capsys.readouterr().err
    assert main(["tpu", "ls", "--orphans", "--everybody", "--project", "project"]) == 0
    output = capsys.readouterr().out
    assert "no slice uses the disk texts (9 GB in us-central2-b, made by " in output
    assert "  headrace tpu disk delete texts --project project --zone us-central2-b --force\n" in output
    scenario.google.disks["texts"]["users"] = ["projects/project/zones/us-central2-b/instances/vm"]
    assert main(["tpu", "ls", "--orphans", "--everybody"]) == 0 and not capsys.readouterr().out
    assert main(["tpu", "disk", "delete", "texts", "--force", *zone]) == 0 and not scenario.google.disks


def test_a_slice_under_repair_is_not_deleted_without_force(scenario, capsys):
    scenario.google.make_node(NODE, HEADRACE)
    scenario.google.nodes[NODE]["state"] = "REPAIRING"
    assert main(["tpu", "delete", "job", *scenario.key]) == 2 and NODE in scenario.google.nodes
    assert "job: found it REPAIRING, and its workers cannot be reached" in capsys.readouterr().err
    scenario.google.nodes[NODE]["state"] = "CREATING"  # nothing has ever run on it
    assert main(["tpu", "delete", "job", *scenario.key]) == 0 and scenario.is_nothing_left()


def test_the_status_of_a_stopped_slice_says_what_happens_after_a_start(scenario, capsys):
    for hours, message in (
        (0.5, "its hours end in 30 min; started later, it deletes itself"),
        (9, "its hours are used up; if it is started, it"),
    ):
        make_old_slice(scenario, hours)
        scenario.google.nodes[NODE]["state"] = "STOPPED"
        assert main(["tpu", "status", "job", *scenario.key]) == 0
        output = capsys.readouterr().out
        assert message in output and "deletes itself in" not in output and "SHOULD" not in output
        scenario.google.nodes.clear()
        scenario.google.num_created_nodes = 9  # addresses of other machines


def test_a_user_without_a_name_gets_advice(scenario, capsys, monkeypatch):
    scenario.google.make_node(NODE, FOREIGN_OWNER)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987654)
    assert main(["tpu", "status", "job", *scenario.key]) == 2
    assert "set USER or LOGNAME" in capsys.readouterr().err


def test_a_command_on_a_worker_ends_with_ctrl_c(scenario):
    scenario.google.make_node(NODE, HEADRACE)
    process = scenario.start("ssh", "job", *scenario.key, "--", "echo here; sleep 60")
    read_until(process, "[w0] here")
    interrupted_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert wait_for_exit(process)[0] == 130 and time.monotonic() - interrupted_at < 30


def test_a_job_followed_from_another_machine_saves_before_the_slice_is_deleted(scenario, capsys, monkeypatch):
    pids = scenario.start_unattended_training()
    monkeypatch.setenv("HEADRACE_HOME", str(scenario.root / "another-machine"))
    assert main(["tpu", "ls", "--orphans", *scenario.key]) == 0
    output = capsys.readouterr().out
    assert "job is training; if no other machine of yours watches it" in output and "tpu delete" not in output
    scenario.google.block()
    assert main(["tpu", "delete", "job", *scenario.key]) == 2  # an unknown state is not deleted
    reason = "job: cannot check whether anything trains there, since its workers do not respond (ssh: connect"
    assert reason in capsys.readouterr().err
    assert main(["tpu", "delete", "job", "--ssh-key", "none"]) == 2
    assert are_alive(pids) == [True, True] and not deleted_paths(scenario)
    for file in scenario.root.glob("machines/*/blocked"):
        file.unlink()
    assert main(["tpu", "delete", "job", *scenario.key]) == 0
    assert "job: waiting for the trainer to save\ndeleting job\n" in capsys.readouterr().out
    assert scenario.is_nothing_left()
    logs = [file.read_text() for file in scenario.root.glob("machines/*/home/user/.headrace/jobs/job/log")]
    assert len(logs) == 2 and all(log.endswith("saved\n") for log in logs)


def test_a_job_of_another_user_is_found_on_a_slice_without_owner(scenario, capsys):
    scenario.google.make_node(NODE, HEADRACE)
    (machine,) = [path for path in scenario.root.glob("machines/*") if path.name.endswith(".1")]
    recipe = machine / "home/other/.headrace/jobs/theirs/recipe.yaml"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(recipe)]) as process:
        assert main(["tpu", "delete", "job", *scenario.key]) == 2
        output = capsys.readouterr().err
        assert f"job: found another training there ({recipe}); --force deletes it anyway" in output
        assert main(["tpu", "ls", "--orphans", *scenario.key]) == 0
        assert "job is training" in capsys.readouterr().out and NODE in scenario.google.nodes
        process.kill()
    assert main(["tpu", "delete", "job", *scenario.key]) == 0 and scenario.is_nothing_left()


def test_a_trainer_that_does_not_end_is_deleted_with_the_slice(scenario, capsys):
    scenario.set_trainer("wait wait")
    text = (scenario.root / "python").read_text()
    scenario.google.set_trainer_script(text.partition("\n")[2].replace("echo saved; exit 75", "true"))
    process = scenario.launch()
    scenario.wait_until(scenario.is_training)
    process.kill()
    process.communicate()
    assert main(["tpu", "delete", "job", *scenario.key]) == 0 and scenario.is_nothing_left()
    assert "the trainer has not ended within 2 s" in capsys.readouterr().out


def test_a_job_is_identified_by_project_and_name(scenario, capsys, monkeypatch):
    scenario.google.make_node(NODE, HEADRACE)
    for scope, code in (("local", 1), ("other-project", 1), ("project", 0)):
        with job_ledger.watch_lock(f"{scope}/job"):  # held by a run of the job
            assert main(["tpu", "ls", "--orphans", *scenario.key]) == code, scope
            assert ("job is not watched from this machine" in capsys.readouterr().out) == bool(code)
    with job_ledger.watch_lock("project/job"):
        assert main(["tpu", "ls", "--orphans", "--project", "other-project", *scenario.key]) == 1
    scenario.google.nodes.clear()
    job_ledger.JobLedger("other-project/job", "").record("us-west4-a", 1.0, 2.0)
    assert scenario.run() == 0
    requested_paths = [call[1] for call in scenario.google.calls if call[1].endswith("/queuedResources")]
    assert not [path for path in requested_paths if "us-west4-a" in path]
    assert job_ledger.JobLedger("other-project/job").attempts
    assert (scenario.root / "launcher/tpu/project/job/w0.log").exists()


def test_hours_of_earlier_slices_do_not_count_for_a_created_slice(scenario, capsys):
    argv = ["tpu", "create", "--slice", "v4-16", "--name", "pod", "--zone", "us-central2-b", *scenario.key]
    now, ledger = time.time(), job_ledger.JobLedger("project/pod", "")
    ledger.record("us-central2-b", now - 30 * 3600, now - 27 * 3600, 3 * 3600)  # yesterday
    assert main([*argv, "--max-hours", "4"]) == 0
    (node,) = scenario.google.nodes.values()
    assert abs(int(node["metadata"]["headrace-seconds"]) - 4 * 3600) < 60
    created = job_ledger.JobLedger("project/pod").attempts[-1]["created"]
    assert main([*argv, "--max-hours", "4"]) == 0  # it exists: its hours continue
    assert [attempt["created"] for attempt in job_ledger.JobLedger("project/pod").attempts] == [created]


@pytest.mark.parametrize("action", ["ls", "create", "attach", "detach", "delete"])
def test_disk_commands_have_no_local_platform(scenario, capsys, action):
    scenario.google.disks["x"] = {"name": "x", "labels": {"headrace": "yes"}}
    arguments = {"ls": [], "create": ["x", "--size", "1"], "delete": ["x"]}
    argv = arguments.get(action, ["x", "--to" if action == "attach" else "--from", "job"])
    assert main(["tpu", "disk", action, *argv, "--zone", "us-central2-b", "--platform", "local"]) == 2
    assert "unrecognized arguments: --platform" in capsys.readouterr().err and "x" in scenario.google.disks
    assert not scenario.google.calls


def test_a_limit_in_dollars_needs_a_price(tmp_path):
    def make_request(*zones: str, **more) -> Request:
        return Request("job", parse_tpu_slice("v5p-8", ""), zones, **more)

    budget = cost.make_budget(make_request("us-central1-a"), None, 100.0, None)
    assert budget.dollars_per_hour == pytest.approx(4 * 4.78)
    with pytest.raises(cost.UserError, match="and europe-west4-b may cost more; give its price with"):
        cost.make_budget(make_request("us-central1-a", "europe-west4-b"), None, 100.0, None)
    assert cost.make_budget(make_request("europe-west4-b"), 3.0, None, None).hours == 3.0
    file = tmp_path / "prices.yaml"
    file.write_text("V5p: {on_demand: 5.0}\n")
    assert cost.make_budget(make_request("europe-west4-b"), None, 100.0, file).hours == pytest.approx(5.0)
    with pytest.raises(cost.UserError, match=r"v5p: {spot: DOLLARS}"):
        cost.make_budget(make_request("europe-west4-b", terms="spot"), None, 100.0, file)
    output = cost.format_cost(make_request("europe-west4-b"), cost.Budget(3.0, 1.0), is_user_price=False)
    assert "the highest in the US, not in every requested zone" in output
    assert cost.has_user_price(make_request("europe-west4-b"), file) and not cost.has_user_price(
        make_request("x", terms="spot"), file
    )


def test_a_slice_found_outside_the_us_does_not_pass_a_limit_in_dollars(scenario, capsys):
    european_node = NODE.replace("us-central2-b", "europe-west4-b")
    scenario.google.make_node(european_node, HEADRACE)
    job_ledger.JobLedger("project/job").record("europe-west4-b", 1.0, 2.0)
    assert scenario.run("--max-cost", "100") == 2
    assert "europe-west4-b may cost more" in capsys.readouterr().err
    assert european_node in scenario.google.nodes and not scenario.requested_zones()
