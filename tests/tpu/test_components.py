"""The parts of `headrace tpu`: requests refused before any cost, prices, buckets, disks, the uploaded tree,
the rules of the timer, and job files for other schedulers."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path

import jsonschema
import pytest
import yaml

from headrace.cli.main import main
from headrace.errors import UserError
from headrace.hardware import slices
from headrace.tpu import bundle, cost, disk, install, job, job_ledger, outcome, region, timer, worker
from headrace.tpu.local import Local
from headrace.tpu.request import Request, make_slice_name, parse_tpu_slice
from headrace.tpu.schedulers import ExportedJob
from tests.support import fake_gcs
from tests.support.fake_google import Google
from tests.support.fake_machine import free_port
from tests.tpu.test_launch import RECIPE, ROOT

RUN = ["tpu", "run", "--slice", "v4-32", "--zone", "us-central2-b", "--spot"]


CREATE_IN_EUROPE = [
    "tpu",
    "create",
    "--slice",
    "v5p-8",
    "--zone",
    "us-central1-a",
    "--zone",
    "europe-west4-b",
]
EXPORT = ["tpu", "export", "recipe.yaml", "--slice", "v4-8", "--to"]


@pytest.fixture
def google(tmp_path, monkeypatch):
    pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")
    cloud = Google(tmp_path / "google")
    for name, value in cloud.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE.format(run="gs://near/run").replace("/nowhere", "gs://near/data"))
    Path("v4.yaml").write_text("v4: {on_demand: 3.0}\nv5p: {spot: 1.0}\n")
    yield cloud
    cloud.close()


def request(name: str = "v4-32", **options) -> Request:
    return Request("job", parse_tpu_slice(name, ""), ("us-central2-b",), **options)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*RUN, "recipe.yaml", "model.layer=3"], "model.layer: unknown key; did you mean model.layers"),
        (
            [*RUN, "recipe.yaml", "run_dir=runs/x"],
            "run_dir: found runs/x, expected a path that all workers share",
        ),
        ([*RUN, "recipe.yaml", "data.path=data/x"], "data.path: found data/x"),
        (
            [*RUN, "recipe.yaml", "run_dir=gs://far/x"],
            "gs://far is in europe-west4, the slice in us-central2",
        ),
        ([*RUN, "recipe.yaml", "run_dir=gs://none/x"], "gs://none: found 404 Not Found"),
        ([*RUN, "recipe.yaml", "--max-cost", "0"], "--max-cost: found 0, expected a number above 0"),
        ([*RUN, "recipe.yaml", "--name", "My_Job"], "--name: found My_Job, expected lowercase letters"),
        ([*RUN, "recipe.yaml", "--ssh-key", "nokey"], "ssh: found no key with a .pub file next to it"),
        ([*RUN, "recipe.yaml", "init_from=runs/x"], "init_from: found runs/x"),
        ([*RUN, "recipe.yaml", "init_from=gs://far/x"], "gs://far is in europe-west4"),
        ([*RUN, "recipe.yaml", "--env", "KEY=hush"], "--env KEY: found a value with it, expected the name"),
        ([*RUN, "recipe.yaml", "--zone", "us-central2-z"], "Location us-central2-z is not found"),
        ([*RUN, "recipe.yaml", "--disk", "My_Disk"], "--disk: found My_Disk, expected lowercase letters"),
        (
            [*RUN, "recipe.yaml", "--disk", "x", "run_dir=/mnt/x/run"],
            "run_dir: found /mnt/x/run, expected a path",
        ),
        ([*RUN, "recipe.yaml", "--disk", "none"], "disk: The resource 'none' was not found"),
        (["tpu", "disk", "create", "A/b", "--size", "1", "--zone", "us-central2-b"], "DISK: found A/b"),
        (["tpu", "run", "--slice", "v4-32", "recipe.yaml"], "--zone: found none"),
        (["tpu", "create", "--slice", "v4-32", "--zone", "us"], "--zone: found us, expected a zone such as"),
        (["tpu", "create", "--slice", "gpu:h200x8", "--zone", "us-central2-b"], "expected TPUs"),
        (["tpu", "create", "--slice", "v4:2x2x4", "--zone", "us-central2-b"], "expected a size"),
        (["tpu", "create", "--slice", "tpu7x-8", "--zone", "us-central2-b"], "name one with --runtime"),
        (["tpu", "status", "nobody"], "nobody: found no slice of this name"),
        (["tpu", "disk", "create", "x", "--size", "10"], "--zone: found none, expected the zone of the disk"),
        (["tpu", "export", "recipe.yaml", "--to", "jobset", "--slice", "v4-8"], "--image: found none"),
        (["tpu", "create", "--slice", "v4-8", "--platform", "local", "--disk", "x"], "--disk: found x"),
        (
            [*CREATE_IN_EUROPE, "--max-cost", "100"],
            "the known prices are those of the US, and europe-west4-b may cost more",
        ),
        ([*CREATE_IN_EUROPE, "--max-cost", "100", "--prices", "v4.yaml"], "`v5p: {on_demand: DOLLARS}`"),
        (["tpu", "tensorboard", "nowhere"], "nowhere: found no folder"),
        (["tpu", "status", "../x"], "NAME: found ../x, expected lowercase letters"),
        (["tpu", "logs", "A b"], "NAME: found A b"),
        (["tpu", "delete", "a/b"], "NAME: found a/b"),
        ([*EXPORT, "slurm", "--max-hours", "nan"], "--max-hours: found nan, expected a number above 0"),
        ([*EXPORT, "slurm", "--name", "a b;c"], "--name: found a b;c, expected lowercase letters"),
        (
            [*EXPORT, "jobset", "--image", "x", "run_dir=runs/x"],
            "run_dir: found runs/x, expected run_dir=gs://",
        ),
        ([*EXPORT, "skypilot", "run_dir=/mnt/x"], "run_dir: found /mnt/x, expected run_dir=gs://"),
        ([*RUN, "recipe.yaml", "run_dir=gs://shy/x"], "gs://shy: you may not look up its location"),
    ],
)
def test_mistakes_are_reported_in_a_single_line_and_nothing_is_requested(google, capsys, argv, message):
    if "--ssh-key" not in argv and argv[1] in ("run", "create"):
        argv = [*argv, "--ssh-key", str(google.root / "key")]
    assert main(argv) == 2
    errors = capsys.readouterr().err
    assert "hush" not in errors
    assert message in errors and errors.startswith("headrace: ") and errors.count("\n") == 1
    assert not google.queued and not google.disks


def test_requests_for_disks_buckets_and_zones_are_retried(google):
    google.disks["texts"] = {"name": "texts"}
    google.fault("GET", "/storage/", 503)
    google.fault("GET", "/disks/", 502)
    google.fault("GET", "/locations/-/", 400, "unknown location")
    google.fault("GET", "project/locations", 503)
    assert region.check_bucket_regions(["gs://near/x"], ["us-central2-b"], allow_far=False) == []
    disk.check_disks_exist("project", ["us-central2-b"], ["texts"])
    assert main(["tpu", "ls"]) == 0 and not google.faults


@pytest.mark.parametrize("action", ["run", "create"])
def test_a_dry_run_on_this_machine_needs_no_network(tmp_path, monkeypatch, capsys, action):
    monkeypatch.setattr("headrace.tpu.google_auth.load_credentials", lambda url: pytest.fail("requeued"))
    for name in ("CLOUDSDK_CORE_PROJECT", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(run="run"))
    recipe = [str(tmp_path / "recipe.yaml")] if action == "run" else []
    assert main(["tpu", action, "--platform", "local", "--slice", "v4-16", "--dry-run", *recipe]) == 0
    assert "2 processes of this machine" in capsys.readouterr().out


# A fake gcloud: the same requests, and ssh and scp to the same machines.
GCLOUD = """\
#!{python}
import json, shlex, shutil, subprocess, sys, urllib.request
words = sys.argv[1:]
options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
assert words[:2] == ["compute", "tpus"]
act, name = words[2:4], words[4]
parent = "projects/" + options["project"] + "/locations/" + options["zone"]
def ask(method, path, body=None):
    data = json.dumps(body).encode() if body else None
    return json.load(urllib.request.urlopen(urllib.request.Request("{url}/v2/" + path, data, method=method)))
if act == ["queued-resources", "create"]:
    pairs = lambda text: dict(pair.split("=", 1) for pair in text.split(","))
    node = dict(acceleratorType=options["accelerator-type"], labels=pairs(options["labels"]))
    node["metadata"] = pairs(options["metadata"])
    spec = dict(parent=parent, node=node)
    if "node-count" in options:
        count = int(options["node-count"])
        spec["multisliceParams"] = dict(nodeCount=count, nodeIdPrefix=options["node-prefix"])
    else:
        spec["nodeId"] = options["node-id"]
    ask("POST", parent + "/queuedResources?queuedResourceId=" + name, dict(tpu=dict(nodeSpec=[spec])))
elif act == ["queued-resources", "describe"]:
    print(ask("GET", parent + "/queuedResources/" + name)["state"]["state"])
elif act == ["queued-resources", "delete"]:
    ask("DELETE", parent + "/queuedResources/" + name + "?force=true")
else:
    target, _, to = words[5].partition(":") if act[1] == "scp" else (name, "", "")
    for end in ask("GET", parent + "/nodes/" + target)["networkEndpoints"]:
        address = end["accessConfig"]["externalIp"]
        if act[1] == "scp":
            shutil.copy(name, "{root}/machines/" + address + "/home/user/" + to)
        else:
            command = "bash -c " + shlex.quote(options["command"])
            subprocess.run(["{root}/ssh", "user@" + address, "--", command], check=True)
"""


@pytest.mark.parametrize("name", ["v4-16", pytest.param("2xv4-16", marks=pytest.mark.slow)])
def test_the_commands_that_a_dry_run_prints_train_manually(google, capsys, monkeypatch, name):
    """Also with a recipe outside of the tree, a disk, and an extra that the recipe needs."""
    tree = google.root / "tree"
    subprocess.run(["git", "init", "-q", tree], check=True)
    for file in ("pyproject.toml", "constraints.txt", ".env", "headrace/__init__.py", "new folder/a.txt"):
        (tree / file).parent.mkdir(exist_ok=True)
        (tree / file).write_text("x")
    subprocess.run(["git", "-C", tree, "add", "pyproject.toml"], check=True)
    monkeypatch.setattr("headrace.tpu.bundle.find_repository", lambda: tree)
    shim = google.root / "bin" / "gcloud"
    shim.write_text(GCLOUD.format(python=sys.executable, url=google.url, root=google.root))
    shim.chmod(0o755)
    trainer_script = (
        'cp "$4" "$HOME/trained"; ls -A . > "$HOME/tree"; pwd >> "$HOME/tree"; echo "$@" > "$HOME/arguments"'
    )
    google.set_trainer_script(trainer_script)
    argv = ["--slice", name, "--name", "job", "--zone", "us-central2-b", "--disk", "texts", "--dry-run"]
    assert main(["tpu", "run", *argv, "recipe.yaml", "log.wandb=true"]) == 0
    lines = capsys.readouterr().out.partition("\n")[2]  # the first line is the cost
    assert "--extra wandb" in lines
    lines, _, delete_command = lines.rstrip().rpartition("\n")
    env = os.environ | {"PATH": f"{google.root}/bin:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "-e", "-c", lines.replace("sleep 10", "sleep 0.1")], env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    machines = list((google.root / "machines").glob("*/home/user"))
    assert len(machines) == (4 if "x" in name else 2)
    for home in machines:
        assert (home / "trained").read_text() == Path("recipe.yaml").read_text()
        listing = (home / "tree").read_text().split("\n")
        assert {"headrace", "new folder", ".recipe.yaml"} <= set(listing) and ".env" not in listing
        assert (home / "arguments").read_text().endswith("log.wandb=true\n")
    assert (google.root / "sudo.log").read_text().count("mount -o ro,noload") == len(machines)
    assert subprocess.run(["bash", "-e", "-c", delete_command], env=env).returncode == 0
    assert all(request["deleted_at"] is not None for request in google.queued.values())


def test_prices_match_the_plan_and_a_cost_limit_becomes_hours(tmp_path):
    assert cost.find_dollars_per_hour(request(terms="spot")) == pytest.approx(0.92 * 16)
    # The most expensive region of the US in the catalog: us-south1 (v5e, v5p), and of v6e on spot.
    assert cost.find_dollars_per_hour(request("2xv5e-16")) == pytest.approx(1.42 * 32)
    assert cost.find_dollars_per_hour(request("v5p-16")) == pytest.approx(4.78 * 8)
    assert cost.find_dollars_per_hour(request("v6e-8", terms="spot")) == pytest.approx(1.78 * 8)
    assert cost.make_budget(request(), None, None, None) == cost.Budget(24, 3.22 * 16, set_by_user=False)
    assert cost.make_budget(request(), 100, 51.52, None).hours == pytest.approx(1)
    assert cost.make_budget(request(), 0.5, 51.52, None).hours == 0.5
    with pytest.raises(UserError, match="no price of spot v2 is known"):
        cost.make_budget(request("v2-8", terms="spot"), None, 10, None)
    (tmp_path / "prices.yaml").write_text("v2: {spot: 0.5}\n")
    assert cost.make_budget(request("v2-8", terms="spot"), None, 10, tmp_path / "prices.yaml").hours == 5
    summary = cost.format_cost(request(), cost.make_budget(request(), 2, None, None), is_user_price=False)
    assert (
        "v4-32 on-demand (16 chips, 4 workers): $51.52 per hour" in summary and "2 h and $103.04" in summary
    )


def test_slices_are_requested_with_googles_names():
    assert (
        request("v5e-16").accelerator == "v5litepod-16" and request("v5e-16").image == "v2-alpha-tpuv5-lite"
    )
    assert request("2xv5e-256").accelerator == "v5litepod-256"
    assert request("v5p-128").accelerator == "v5p-128" and request("v6e-8").accelerator == "v6e-8"
    assert make_slice_name("Llama3.2_1B (new)") == "headrace-llama3-2-1b-new"


def test_a_bucket_far_from_the_slice_is_refused(google):
    zones = ["us-central2-b"]
    assert region.check_bucket_regions(["gs://near/x", "/mnt/y"], zones, allow_far=False) == []
    assert "spread over US" in region.check_bucket_regions(["gs://wide/x"], zones, allow_far=False)[0]
    with pytest.raises(UserError, match="--far-bucket"):
        region.check_bucket_regions(["gs://far/x"], zones, allow_far=False)
    with pytest.raises(UserError, match="the slice in us-east1"):
        region.check_bucket_regions(["gs://near/x"], ["us-central2-b", "us-east1-d"], allow_far=False)
    assert len(region.check_bucket_regions(["gs://far/x"], zones, allow_far=True)) == 1
    assert "its location is unknown" in region.check_bucket_regions(["gs://shy/x"], zones, allow_far=True)[0]
    with pytest.raises(UserError, match="--far-bucket continues without"):
        region.check_bucket_regions(["gs://shy/x"], zones, allow_far=False)
    google.buckets["pair"] = {
        "location": "US",
        "customPlacementConfig": {"dataLocations": ["US-CENTRAL2", "US-EAST1"]},
    }
    google.buckets["nam"] = {"location": "NAM4"}
    assert region.check_bucket_regions(["gs://pair/x"], zones, allow_far=False) == []
    assert region.check_bucket_regions(["gs://nam/x"], ["us-east1-d"], allow_far=False) == []
    with pytest.raises(UserError, match="gs://nam is in nam4"):
        region.check_bucket_regions(["gs://nam/x"], ["europe-west4-a"], allow_far=False)


def test_the_tree_is_sent_with_uncommitted_changes_and_without_secrets(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name, text in {
        "a.py": "1",
        ".gitignore": "ignored\n",
        "ignored": "x",
        ".env": "TOKEN=1",
        "deploy.pem": "x",
        "sub/key.json": '{"type": "service_account", "private_key": "x"}',
        "sub/config.json": '{"type": "llama"}',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "-C", tmp_path, "add", "a.py"], check=True)
    (tmp_path / "a.py").write_text("2")
    sent_tree = bundle.make_bundle(tmp_path)
    assert sent_tree.skipped == (".env", "deploy.pem", "sub/key.json")
    with tarfile.open(fileobj=io.BytesIO(sent_tree.content)) as archive:
        assert archive.getnames() == [".gitignore", "a.py", "sub/config.json"]
        assert archive.extractfile("a.py").read() == b"2"
    assert bundle.make_bundle(tmp_path).name == sent_tree.name
    (tmp_path / "a.py").write_text("3")
    assert bundle.make_bundle(tmp_path).name != sent_tree.name


def test_the_sent_tree_has_no_secrets_and_no_files_from_outside(tmp_path):
    tree, outside = tmp_path / "tree", tmp_path / "beyond"
    subprocess.run(["git", "init", "-q", tree], check=True)
    outside.write_text("outside of the repository")
    key_header = "-----BEGIN " + "PRIVATE KEY-----"
    secrets = {
        name: "x"
        for name in (
            ".aws/config",
            ".envrc",
            ".env.local",
            ".git-credentials",
            ".netrc",
            "_netrc",
            "id_work",
            "kaggle.json",
            "hf_token",
            "token.txt",
            "my-Token.yaml",
            "a/b.pem",
            "c.key",
            "id_ed25519.pub",
            "google_compute_engine",
            "google_compute_engine.pub",
            ".ssh/config",
            "secrets.yaml",
            ".pypirc",
            ".npmrc",
            ".boto",
            "openai_api_key",
            "my_api_key.txt",
        )
    }
    token = "hf_" + "aB3dE5gH7jK9mN1pQ"
    secrets |= {"run.sh": f"export HF_TOKEN={token}\n", "notes.md": f"my token is {token}"}
    secrets["setup.cfg"] = "[x]\nWANDB_API_KEY = 0123456789abcdef0123\n"
    secrets |= {"account.json": '{"private_key" : "x"}', "deep.yaml": f"key: |\n  {key_header}\n  x"}
    secrets["paste.py"] = f'KEY = """{key_header}\n{"MIIE" * 8}"""'
    harmless = {"tokenizer.json": "{}", "special_tokens_map.json": "{}", "cut_tokens.py": "1", "idle.py": "1"}
    harmless |= {"about.py": f'KEY = "{key_header}"', "real": "1"}
    harmless |= {
        "job.sh": 'export HF_TOKEN="$HF_TOKEN"\n',
        "k8s.yaml": "WANDB_API_KEY: <your key goes here>\n",
    }
    for name, text in (secrets | harmless).items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)
    (tree / "link").symlink_to("real")
    (tree / "leak").symlink_to(outside)
    sent_tree = bundle.make_bundle(tree)
    assert set(sent_tree.skipped) == {*secrets, "leak"}
    with tarfile.open(fileobj=io.BytesIO(sent_tree.content)) as archive:
        assert set(archive.getnames()) == {*harmless, "link"}


def test_every_file_of_this_repository_is_sent():
    assert not bundle.make_bundle(ROOT).skipped


def test_the_stamp_of_an_environment_changes_with_a_version(tmp_path):
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    before = install.environment_stamp(tmp_path)
    assert before == install.environment_stamp(ROOT) and before in install.make_install_script(tmp_path)
    assert install.environment_stamp(tmp_path, ["wandb"]) != before
    assert "--extra tpu --extra gcs --extra wandb" in install.make_install_script(tmp_path, ["wandb"])
    with open(tmp_path / "constraints.txt", "a") as file:
        file.write("one-more==1.0\n")
    assert install.environment_stamp(tmp_path) != before
    scripts = [install.make_install_script(ROOT), bundle.UNPACK.format(name="x"), job.EXIT_IF_NEW]
    scripts += [install.make_mount_script("texts", 1, "ro"), install.make_mount_script("texts", 2, "rw")]
    for script in scripts:
        assert "{" not in script.replace("${", "").replace("{}", "")  # no placeholder is left
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_disks_are_created_attached_and_deleted_and_a_single_machine_writes(google, capsys):
    zone = ["--zone", "us-central2-b"]
    assert main(["tpu", "disk", "create", "texts", "--size", "100", "--slice", "v6e-8", *zone]) == 0
    assert google.disks["texts"]["sizeGb"] == "100" and "hyperdisk" in google.disks["texts"]["type"]
    assert main(["tpu", "disk", "create", "texts", "--size", "100", *zone]) == 2
    assert "already exists" in capsys.readouterr().err
    config = {"labels": {"headrace": "yes"}, "metadata": {}}
    parent = "projects/project/locations/us-central2-b/nodes"
    google.make_node(f"{parent}/pod", config | {"acceleratorType": "v4-16"})
    key = ["--ssh-key", str(google.root / "key")]
    assert main(["tpu", "disk", "attach", "texts", "--to", "pod", "--write", *zone, *key]) == 2
    assert "has 2 workers, expected one" in capsys.readouterr().err
    assert main(["tpu", "disk", "attach", "texts", "--to", "pod", *zone, *key]) == 0
    source = "projects/project/zones/us-central2-b/disks/texts"
    assert [disk["sourceDisk"] for disk in google.nodes[f"{parent}/pod"]["dataDisks"]] == [source]
    assert (google.root / "sudo.log").read_text().count("mount -o ro,noload") == 2
    assert main(["tpu", "disk", "delete", "texts", *zone]) == 2  # in use
    assert main(["tpu", "disk", "detach", "texts", "--from", "pod", *zone, *key]) == 0
    assert not google.nodes[f"{parent}/pod"]["dataDisks"]
    assert main(["tpu", "disk", "delete", "texts", *zone]) == 0 and not google.disks


def test_foreign_disks_are_not_deleted_and_unused_disks_are_listed(google, capsys):
    zone = ["--zone", "us-central2-b"]
    properties = {"zone": "z/us-central2-b", "sizeGb": "9", "type": "t/pd-ssd"}
    google.disks["colleague"] = {"name": "colleague"} | properties
    google.disks["texts"] = {"name": "texts", "labels": {"headrace": "yes"}} | properties
    assert main(["tpu", "disk", "delete", "colleague", *zone]) == 2 and "colleague" in google.disks
    assert "colleague: not created by Headrace; --force" in capsys.readouterr().err
    for options in ([], zone):
        assert main(["tpu", "disk", "ls", *options]) == 0
        assert capsys.readouterr().out == "texts  us-central2-b  9 GB  pd-ssd\n"
    assert main(["tpu", "ls", "--orphans"]) == 0
    warning = "no slice uses the disk texts (9 GB in us-central2-b), which costs"
    assert warning in capsys.readouterr().out
    parent = "projects/project/locations/us-central2-b/nodes"
    source = "projects/123456789/zones/us-central2-b/disks/texts"
    config = {"acceleratorType": "v4-8", "metadata": {}, "dataDisks": [{"sourceDisk": source}]}
    google.make_node(f"{parent}/pod", config)
    assert main(["tpu", "ls", "--orphans"]) == 0 and "texts" not in capsys.readouterr().out
    google.fault("GET", "/aggregated/", 403, "compute.disks.list is needed")
    assert main(["tpu", "ls", "--orphans"]) == 0
    assert "disks could not be listed: disk: compute.disks.list" in capsys.readouterr().out
    assert main(["tpu", "disk", "delete", "colleague", "--force", *zone]) == 0
    assert set(google.disks) == {"texts"}


def test_slices_are_listed_zone_by_zone_if_the_wildcard_is_refused(google, capsys):
    config = {"acceleratorType": "v4-8", "labels": {"headrace": "yes"}, "metadata": {}}
    google.make_node("projects/project/locations/us-east1-d/nodes/lost", config)
    google.fault("GET", "/locations/-/", 400, "unknown location")
    assert main(["tpu", "ls"]) == 0
    assert capsys.readouterr().out.startswith("lost  us-east1-d  v4-8  on-demand  READY")
    assert main(["tpu", "ls", "--orphans"]) == 1
    assert main(["tpu", "delete", "lost", "--ssh-key", str(google.root / "key")]) == 0 and not google.nodes
    assert main(["tpu", "ls"]) == 0 and capsys.readouterr().out.endswith("no slices\n")


def test_tensorboard_reads_a_run_from_a_bucket(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(tmp_path / "events")) as writer:
        writer.add_scalar("loss", 1.5, 3)
    with fake_gcs.running("bucket") as store:
        (file,) = (tmp_path / "events").iterdir()
        store.put("bucket", f"runs/x/tensorboard/{file.name}", file.read_bytes())
        command = [sys.executable, "-m", "headrace", "tpu", "tensorboard", "gs://bucket/runs/x", "--port"]
        port = str(free_port())
        env = os.environ | store.environment | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([*command, port], env=env, start_new_session=True)
        try:
            curve = None
            for _ in range(900):
                time.sleep(0.1)
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(
                        f"http://localhost:{port}/data/plugin/scalars/scalars?tag=loss&run=.", timeout=5
                    ) as response,
                ):
                    curve = json.loads(response.read())
                    break
            assert curve is not None and curve[0][1:] == [3, 1.5]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_slice_whose_job_ended_or_never_started_is_idle(tmp_path, monkeypatch):
    monkeypatch.setattr(timer, "HOMES", str(tmp_path))
    monkeypatch.setattr(timer, "ROOT_HOME", str(tmp_path / "root"))
    now = time.time()
    assert not timer.is_idle(now - 15, 10) and timer.is_idle(now - 25, 10)  # nothing was ever set up
    job = tmp_path / "user" / ".headrace" / "jobs" / "job"
    job.mkdir(parents=True)
    assert not timer.is_idle(now - 1000, 10)  # set up a moment ago
    (job / "exit").write_text("0")
    assert not timer.is_idle(now - 1000, 10)
    os.utime(job / "exit", (now - 20, now - 20))
    assert timer.is_idle(now - 1000, 10) and not timer.is_idle(now - 1000, 30)


def test_a_slice_whose_job_was_killed_without_an_exit_code_is_idle(tmp_path, monkeypatch):
    monkeypatch.setattr(timer, "HOMES", str(tmp_path))
    monkeypatch.setattr(timer, "ROOT_HOME", str(tmp_path / "root"))
    now, job = time.time(), tmp_path / "user" / ".headrace" / "jobs" / "job"
    job.mkdir(parents=True)
    code = "import time; time.sleep(60)"
    trainer = subprocess.Popen([sys.executable, "-c", code, str(job / "recipe.yaml")])
    try:
        (job / "pid").write_text(str(trainer.pid))
        (job / "log").write_text("step 1")
        while not timer.running_pid(job):  # its command line appears a moment later
            time.sleep(0.01)
        for path in (job / "pid", job / "log", job):
            os.utime(path, (now - 20, now - 20))
        assert not timer.is_idle(now - 1000, 10)  # no launcher follows it, but it trains
    finally:
        trainer.kill()
        trainer.wait()
    assert timer.is_idle(now - 1000, 10) and not timer.is_idle(now - 1000, 60)
    (job / "pid").write_text(str(os.getpid()))  # the pid was reused by another process
    os.utime(job / "pid", (now - 20, now - 20))
    assert timer.is_idle(now - 1000, 10)


def test_a_machine_that_may_not_delete_its_slice_is_switched_off(google, monkeypatch):
    name = "projects/project/locations/us-central2-b/nodes/job"
    script = (ROOT / "headrace/tpu/timer.py").read_text()
    resource = "projects/project/locations/us-central2-b/queuedResources/x"
    metadata = {"startup-script": script, "headrace-seconds": "0", "headrace-resource": resource}
    google.make_node(name, {"acceleratorType": "v4-8", "metadata": metadata})
    google.fault("DELETE", "", 403, "forbidden", count=100)
    google.start_timer(name, "127.0.1.1")
    machine = google.root / "machines" / "127.0.1.1"
    deadline = time.monotonic() + 60
    while not (machine / "switched-off").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (machine / "timer.log").read_text().count("delete: 403") == timer.MAX_DELETE_ATTEMPTS
    google.faults.clear()  # the role is granted: deletion of the stopped machine is still requested
    google.make_queued("projects/project/locations/us-central2-b/queuedResources/x", name)
    while google.queued:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        google.handle_request("GET", "/", {}, None)


@pytest.mark.parametrize("permissions", [[], ["tpu.nodes.delete"]])
def test_a_deletion_that_is_accepted_and_fails_is_requested_again(google, permissions):
    name = "projects/project/locations/us-central2-b/nodes/job"
    script = (ROOT / "headrace/tpu/timer.py").read_text()
    resource = "projects/project/locations/us-central2-b/queuedResources/job"
    metadata = {"startup-script": script, "headrace-seconds": "0", "headrace-resource": resource}
    google.make_node(name, {"acceleratorType": "v4-8", "metadata": metadata})
    google.make_queued(resource, name)
    google.failing_deletions, google.allowed_permissions = 3, permissions
    google.start_timer(name, "127.0.1.1")
    deadline = time.monotonic() + 60
    while google.nodes:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        google.handle_request("GET", "/", {}, None)
    machine = google.root / "machines" / "127.0.1.1"
    assert (machine / "timer.log").read_text().count("requested the deletion of this slice") >= 4
    assert (machine / "may-delete").read_text() == ("yes" if permissions else "no") + " tpu.nodes.delete"


def test_hours_count_over_all_attempts(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    ledger = job_ledger.JobLedger("job")
    ledger.record("z", 1000.0, 1000.0)
    ledger.record("z", 1000.0, 4600.0)
    ledger.close(10000.0)
    ledger.record("y", 9000.0, 9000.0)
    ledger.record("y", 9000.0, 10800.0)
    ledger.close(10800.0)
    now = 50000.0
    assert job_ledger.JobLedger("job").hours_spent(now) == pytest.approx(3.0)
    assert job_ledger.JobLedger("job").hours_spent(now, excluding=1000.0) == pytest.approx(0.5)
    assert job_ledger.JobLedger("job", "gs://other/run").hours_spent(now) == 0
    assert not job_ledger.is_watched("job")
    with job_ledger.watch_lock("job"):
        assert job_ledger.is_watched("job")


def test_an_open_attempt_counts_until_its_timer_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    job_ledger.JobLedger("job").record(
        "z", 1000.0, 1060.0, time_limit=7200.0
    )  # and then the launcher is killed
    assert job_ledger.JobLedger("job").hours_spent(4600.0) == pytest.approx(1.0)
    assert job_ledger.JobLedger("job").hours_spent(10**6) == pytest.approx(2.0)
    ledger = job_ledger.JobLedger("job")
    ledger.close(4600.0)  # the slice has been found gone
    assert job_ledger.JobLedger("job").hours_spent(10**6) == pytest.approx(1.0)


def test_a_slice_is_found_in_a_zone_other_than_the_last_recorded(google, capsys):
    config = {"acceleratorType": "v4-8", "labels": {"headrace": "yes"}, "metadata": {}}
    google.make_node("projects/project/locations/us-east1-d/nodes/lost", config)
    job_ledger.JobLedger("project/lost").record("us-central2-b", 1.0, 2.0)
    assert main(["tpu", "status", "lost", "--ssh-key", str(google.root / "key")]) == 0
    assert "in us-east1-d: READY" in capsys.readouterr().out
    assert main(["tpu", "delete", "lost", "--zone", "us-central2-b"]) == 2  # only the named zone is searched
    assert main(["tpu", "delete", "lost", "--ssh-key", str(google.root / "key")]) == 0 and not google.nodes


@pytest.mark.parametrize(
    ("codes", "end"),
    [
        ([0, 0], outcome.JobEnd.DONE),
        ([78, 2], outcome.JobEnd.FAILED),
        ([3, 78], outcome.JobEnd.FAILED),
        ([137, 1], outcome.JobEnd.FAILED),
        ([78, 77], outcome.JobEnd.FAULTY_WORKER),
        ([75, 75], outcome.JobEnd.RESTARTABLE),
        ([0, 134], outcome.JobEnd.RESTARTABLE),
    ],
)
def test_exit_codes_of_all_workers_are_combined_into_a_single_outcome(codes, end):
    assert outcome.classify_exit(codes).end is end


def test_deleting_a_local_slice_kills_only_the_processes_of_the_slice(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    cloud = Local()
    cloud.create(Request("pod", parse_tpu_slice("v4-16", "any"), ("local",)), "local", 3600.0, None)
    job_dir = tmp_path / "local" / "pod" / "w0" / ".headrace" / "jobs" / "pod"
    other_dir = tmp_path / "local" / "pod" / "w1" / ".headrace" / "jobs" / "pod"
    code = [sys.executable, "-c", "import time; time.sleep(60)"]
    trainer = subprocess.Popen([*code, str(job_dir / "recipe.yaml")], start_new_session=True)
    other_process = subprocess.Popen(code, start_new_session=True)
    try:
        for folder, process in ((job_dir, trainer), (other_dir, other_process)):
            folder.mkdir(parents=True)
            (folder / "pid").write_text(str(process.pid))
        while not worker.is_trainer(trainer.pid, job_dir):
            time.sleep(0.01)
        assert main(["tpu", "ls", "--platform", "local"]) == 0
        assert "deletes itself" not in capsys.readouterr().out
        cloud.delete(cloud.find("pod"))
        assert trainer.wait(10) == -9 and other_process.poll() is None and cloud.find("pod") is None
    finally:
        for process in (trainer, other_process):
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", ["HEADRACE_POLL", "HEADRACE_PATIENCE"])
def test_an_invalid_timeout_is_reported_in_a_single_line(name):
    env = os.environ | {"PYTHONPATH": str(ROOT), name: "abc"}
    command = [sys.executable, "-m", "headrace", "tpu", "ls", "--platform", "local"]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == f"headrace: {name}: found abc, expected seconds above 0\n"


def test_a_reused_process_id_is_not_mistaken_for_the_trainer(tmp_path):
    (tmp_path / "pid").write_text(str(os.getpid()))
    (tmp_path / "identity").write_text("x")
    (tmp_path / "log").write_text("")
    assert worker.read_state(tmp_path)["running"] is False


def test_no_module_of_the_launcher_imports_jax():
    names = [f"headrace.tpu.{p.stem}" for p in (ROOT / "headrace/tpu").glob("*.py")]
    names += [f"headrace.cli.{p.stem}" for p in (ROOT / "headrace/cli").glob("tpu*.py")]
    code = f"import sys; [__import__(name) for name in {names}]; assert 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def make_exported_job(name: str = "2xv5e-256", **options) -> ExportedJob:
    fields = dict(
        name="job", command=("headrace", "train", "a b.yaml", "run_dir=gs://b/r"), spot=True, hours=1.5
    )
    fields |= dict(image="image", accelerator="v5litepod-256", runtime="v2-alpha-tpuv5-lite")
    return ExportedJob(slice=slices.parse_slice(name), **fields | options)


def render(to: str, run: ExportedJob) -> str:
    return importlib.import_module(f"headrace.tpu.schedulers.{to}").render(run)


def test_a_jobset_has_a_job_for_each_slice_that_kubernetes_accepts():
    validate = pytest.importorskip("kubernetes_validate").validate
    tree = yaml.safe_load(render("jobset", make_exported_job()))
    (replicated_job,) = tree["spec"]["replicatedJobs"]
    job = replicated_job["template"]["spec"]
    assert replicated_job["replicas"] == 2 and job["parallelism"] == job["completions"] == 64
    trainer = job["template"]["spec"]["containers"][0]
    assert trainer["resources"]["limits"]["google.com/tpu"] == 4
    assert trainer["command"] == ["headrace", "train", "a b.yaml", "run_dir=gs://b/r"]
    manifest = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job}
    validate(manifest, "1.31", strict=True)
    job["paralelism"] = 1
    with pytest.raises(Exception, match="paralelism"):
        validate(manifest, "1.31", strict=True)
    with pytest.raises(UserError, match="--to jobset: found gpu:h200x8"):
        render("jobset", make_exported_job("gpu:h200x8"))


def jobset_schema() -> dict:
    """JSON schema of jobset.x-k8s.io/v1alpha2, from the models that Kubeflow generates from its OpenAPI
    description; unknown names are refused, as by the API server."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    schema = models.JobsetV1alpha2JobSet.model_json_schema(by_alias=True)
    for definition in schema["$defs"].values():
        if "one_of_schemas" in definition.get("properties", ()):  # a number or a string, such as 4 or 4Gi
            definition.clear()
            definition["type"] = ["integer", "string"]
        elif "properties" in definition:
            definition["additionalProperties"] = False
    rule = schema["$defs"]["JobsetV1alpha2FailurePolicyRule"]["properties"]
    rule["action"]["enum"] = re.findall(r"\b(?:Fail|Restart)\w+", rule["action"]["description"])
    rule["name"]["pattern"] = re.search(r'"(.*)"', rule["name"]["description"])[1]
    return schema | {"additionalProperties": False}


def test_a_jobset_matches_its_schema():
    validator = jsonschema.Draft202012Validator(jobset_schema())
    text = render("jobset", make_exported_job())
    assert not list(validator.iter_errors(yaml.safe_load(text)))
    corruptions = {
        "maxRestarts: 100": "maxRestart: 100",
        "replicas: 2": "replicas: two",
        "FailJobSet": "Fail",
    }
    corruptions |= {
        "backoffLimit": "backOffLimit",
        "name: slice": "names: slice",
        "google.com/tpu: 4": "google.com/tpu: [4]",
    }
    corruptions |= {"name: mistake": "name: my-mistake", "kind: JobSet": "sort: JobSet"}
    for good, bad in corruptions.items():
        assert good in text
        assert list(validator.iter_errors(yaml.safe_load(text.replace(good, bad)))), bad


def test_a_skypilot_task_names_hardware_and_commands():
    task = yaml.safe_load(render("skypilot", make_exported_job("v5e-256")))
    assert task["resources"]["accelerators"] == "tpu-v5litepod-256:1" and task["resources"]["use_spot"]
    assert "train 'a b.yaml'" in task["run"] and "SKYPILOT" not in task["run"]
    for part in ("setup", "run"):
        assert subprocess.run(["bash", "-n"], input=task[part], text=True).returncode == 0
    gpus = yaml.safe_load(render("skypilot", make_exported_job("gpu:h200x16")))
    assert gpus["num_nodes"] == 2 and gpus["resources"]["accelerators"] == "H200:8"
    assert "HEADRACE_COORDINATOR" in gpus["run"] and "--extra gpu" in gpus["setup"]
    with pytest.raises(UserError, match="expected a single slice"):
        render("skypilot", make_exported_job("2xv5e-256"))


# In a separate environment: it needs other versions of our dependencies.
SKY = Path(os.environ.get("HEADRACE_TEST_SKY", ROOT / ".venv" / "sky"))
READ_TASKS = """
import sys, yaml, sky
for file in sys.argv[1:]:
    try:
        task = sky.Task.from_yaml(file)
        print(task.num_nodes, *task.resources)
    except (ValueError, sky.exceptions.InvalidSkyPilotConfigError) as error:
        print("refused", " ".join(str(error).split()))
"""


@pytest.mark.slow
def test_skypilot_accepts_exported_tasks_and_refuses_corrupt_tasks(google, tmp_path, monkeypatch):
    if not (SKY / "bin" / "python").exists():
        pytest.skip("needs SkyPilot in .venv/sky, which `make test-all` installs")
    argv = ["tpu", "export", "recipe.yaml", "log.wandb=true", "--to", "skypilot", "--spot"]
    for name, slice_ in (("tpu", "v6e-16"), ("gpu", "gpu:h200x16")):
        assert main([*argv, "--slice", slice_, "--out", f"{name}.yaml"]) == 0
    text = Path("tpu.yaml").read_text()
    corruptions = {
        "num_nodes: 1": "num_node: 1",
        "use_spot: true": "use_spot: maybe",
        "infra: gcp": "infra: moon",
    }
    corruptions |= {"- 77": "- a", "file_mounts:": "file_mount:"}
    for index, (good, bad) in enumerate(corruptions.items()):
        assert good in text
        Path(f"corrupt{index}.yaml").write_text(text.replace(good, bad))
    files = ["tpu.yaml", "gpu.yaml", *(f"corrupt{index}.yaml" for index in range(len(corruptions)))]
    result = subprocess.run(
        [SKY / "bin" / "python", "-c", READ_TASKS, *files],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path / "home"),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        },
        capture_output=True,
        text=True,
    )
    tpu, gpu, *bad = result.stdout.splitlines()[-len(files) :]
    assert tpu.startswith("1 GCP") and "'tpu-v6e-16': 1" in tpu and "Spot" in tpu, result
    assert gpu.startswith("2 ") and "{'H200': 8}" in gpu, result
    assert len(bad) == len(corruptions) and all(line.startswith("refused") for line in bad), result


def test_an_export_installs_and_sends_what_the_run_needs(google, capsys, tmp_path):
    argv = [
        "tpu",
        "export",
        str(ROOT / "recipes/demo.yaml"),
        "run_dir=gs://b/r",
        "data.path=gs://b/d",
        "--to",
    ]
    assert main([*argv, "skypilot", "--slice", "v5e-8"]) == 0
    task = yaml.safe_load(capsys.readouterr().out)
    assert "headrace train recipes/demo.yaml run_dir=" in task["run"] and "file_mounts" not in task
    assert task["setup"].rstrip().endswith("-r pyproject.toml --extra tpu --extra gcs")
    outside = str(tmp_path / "recipe.yaml")
    argv[2] = outside
    assert main([*argv, "skypilot", "--slice", "v5e-8", "log.wandb=true"]) == 0
    task = yaml.safe_load(capsys.readouterr().out)
    (mounted_path,) = task["file_mounts"]
    assert (
        task["file_mounts"] == {mounted_path: outside}
        and f"headrace train {mounted_path} run_dir=" in task["run"]
    )
    assert task["setup"].rstrip().endswith("--extra gcs --extra wandb")
    assert main([*argv, "jobset", "--slice", "v5e-8", "--image", "image"]) == 0
    assert f"warning: {outside} is not in the working tree" in capsys.readouterr().err
    assert main([*argv, "slurm", "--slice", "v5e-16"]) == 0
    text = capsys.readouterr().out
    assert f"srun headrace train {outside} run_dir=" in text and "#SBATCH --gres=tpu:4\n" in text


@pytest.mark.parametrize("name", ["v5e-8", "2xv5e-256", "16xv5e-256"])
def test_no_pod_of_a_jobset_has_a_name_that_kubernetes_refuses(name):
    with pytest.raises(UserError, match=r"expected at most [0-9]+ with --to jobset") as error:
        render("jobset", dataclasses.replace(make_exported_job(name), name="x" * 60))
    max_length = int(re.search(r"expected at most (\d+)", str(error.value))[1])
    for length in (max_length, max_length + 1):
        with contextlib.nullcontext() if length == max_length else pytest.raises(UserError):
            tree = yaml.safe_load(
                render("jobset", dataclasses.replace(make_exported_job(name), name="x" * length))
            )
    (replicated_job,) = tree["spec"]["replicatedJobs"]
    last = replicated_job["replicas"] - 1, replicated_job["template"]["spec"]["completions"] - 1
    assert len("-".join([tree["metadata"]["name"], replicated_job["name"], *map(str, last), "x7k2p"])) == 63


def test_a_slurm_script_requeues_itself_after_a_stop(tmp_path):
    text = render("slurm", make_exported_job("gpu:h200x16"))
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --time=1:30:00\n" in text
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    for code, is_requeued in ((75, True), (2, False), (0, False)):
        (tmp_path / "requeued").unlink(missing_ok=True)
        shim = f'srun() {{ echo "$@" > ran; return {code}; }}; scontrol() {{ echo "$@" > requeued; }}\n'
        env = os.environ | {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
        result = subprocess.run(["bash", "-c", shim + text], env=env, cwd=tmp_path)
        assert result.returncode == code and (tmp_path / "requeued").exists() == is_requeued
        assert (tmp_path / "ran").read_text() == "headrace train a b.yaml run_dir=gs://b/r\n"
