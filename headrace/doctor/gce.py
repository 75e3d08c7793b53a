"""Google's side of a run: where this machine and the buckets are, how long buckets keep what is deleted,
clocks.

Traffic between regions is charged: one user reports 2,500 dollars before the first alert."""

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from headrace.config import sections
from headrace.doctor.report import CheckResult
from headrace.errors import UserError
from headrace.storage import files as storage_files

METADATA = "169.254.169.254"
METADATA_TIMEOUT = 1.0  # seconds: the server answers at once or does not exist
MAX_SKEW = 5.0  # seconds between two clocks
BROKEN_SKEW = 60.0  # seconds from which tokens and certificates are refused


@dataclass(frozen=True)
class Instance:
    """This machine as a virtual machine of Google Cloud, by its metadata server."""

    zone: str
    accelerator: str  # type of its TPU; empty without one
    skew: float | None  # seconds by which its clock is ahead of the server's

    @property
    def region(self) -> str:
        """The region of its zone."""
        return self.zone.rpartition("-")[0]

    @classmethod
    def find(cls) -> "Instance | None":
        """This machine, or None if it is not in Google Cloud."""
        zone, skew = read_metadata("instance/zone")
        if zone is None:
            return None
        accelerator, _ = read_metadata("instance/attributes/accelerator-type")
        return cls(zone.rpartition("/")[2], accelerator or "", skew)


def read_metadata(name: str) -> tuple[str | None, float | None]:
    """A value of the metadata server, and by how many seconds the local clock is ahead of it; None and None
    if there is no such server."""
    host = os.environ.get("GCE_METADATA_HOST") or METADATA
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/{name}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=METADATA_TIMEOUT) as response:
            # Other networks may have another server at this address.
            if response.headers.get("Metadata-Flavor") != "Google":
                return None, None
            return response.read().decode().strip(), clock_skew(response.headers.get("Date"))
    except (OSError, ValueError, urllib.error.URLError):
        return None, None


def clock_skew(date_header: str | None) -> float | None:
    """Seconds by which the local clock is ahead of a server, whose header has no fractions of a second."""
    if not date_header:
        return None
    return time.time() - parsedate_to_datetime(date_header).timestamp() - 0.5


def buckets_of(cfg: sections.TrainRecipe | None) -> list[str]:
    """The buckets that a recipe names."""
    paths = [] if cfg is None else [cfg.run_dir, cfg.data.path, cfg.init_from or ""]
    return sorted({bucket_of(path) for path in paths if storage_files.is_bucket(path)})


def bucket_of(url: str) -> str:
    """The name of the bucket of a URL."""
    return url.split("://")[1].partition("/")[0]


def check_regions(cfg: sections.TrainRecipe | None, instance: Instance | None) -> list[CheckResult]:
    """Check that the buckets of a recipe are in the region of this machine."""
    buckets = buckets_of(cfg)
    if instance is None:
        reason = "this machine is not in Google Cloud, which charges for data that leaves it"
        return [CheckResult("warn", "region", f"gs://{bucket}: {reason}") for bucket in buckets]
    if not buckets:
        return [CheckResult("ok", "region", f"this machine is in {instance.zone}")]
    return [check_region(bucket, instance) for bucket in buckets]


def check_region(bucket: str, instance: Instance) -> CheckResult:
    """Check that one bucket is in the region of this machine."""
    try:
        location = read_bucket(bucket)["location"].lower()
    except UserError as error:
        return CheckResult("warn", "region", f"gs://{bucket}: its location is unknown: {error}")
    except OSError as error:
        fix = "roles/storage.bucketViewer, or look with `gcloud storage buckets describe`"
        return CheckResult(
            "warn", "region", f"gs://{bucket}: you may not look up its location ({error})", fix
        )
    message = f"gs://{bucket} is in {location}, this machine in {instance.zone}"
    if location == instance.region:
        return CheckResult("ok", "region", message)
    fix = f"gcloud storage buckets create gs://NAME --location={instance.region}, and copy the data there"
    continent = {"eu": "europe"}.get(location, location)
    if location in ("us", "eu", "asia") and instance.region.startswith(continent):
        message += ": slower than a bucket in one region, and reading may cost money"
        return CheckResult("warn", "region", message, fix)
    message += ": all reads and writes are charged as traffic between regions"
    return CheckResult("fail", "region", message, fix)


def check_soft_delete(cfg: sections.TrainRecipe | None) -> list[CheckResult]:
    """Check that the bucket of a run does not keep deleted files: a run deletes most of its checkpoints."""
    if cfg is None or not storage_files.is_bucket(cfg.run_dir):
        return []
    bucket = bucket_of(cfg.run_dir)
    try:
        seconds = int(read_bucket(bucket).get("softDeletePolicy", {}).get("retentionDurationSeconds", 0))
    except (UserError, OSError):
        return []  # `check_region` reports it
    if not seconds:
        return [CheckResult("ok", "bucket", f"gs://{bucket} does not keep deleted files")]
    message = (
        f"gs://{bucket} keeps deleted files for {seconds / 86400:.0f} days, and charges for them: for all "
        "checkpoints of that time, many times the number in checkpoint.keep"
    )
    fix = f"gcloud storage buckets update gs://{bucket} --clear-soft-delete"
    return [CheckResult("warn", "bucket", message, fix)]


def read_bucket(bucket: str) -> dict[str, Any]:
    """The metadata of a bucket."""
    filesystem, _ = storage_files.open_filesystem(f"gs://{bucket}")
    metadata: dict[str, Any] = storage_files.retry(
        f"gs://{bucket}", lambda: json.loads(filesystem.call("GET", "b/{}", bucket)[1])
    )
    return metadata


def read_headers(bucket: str) -> Mapping[str, str]:
    """The HTTP headers of the server of a bucket."""
    filesystem, _ = storage_files.open_filesystem(f"gs://{bucket}")
    call = partial(filesystem.call, "GET", "b/{}/o", bucket, maxResults="1")
    headers: Mapping[str, str]
    headers, _ = storage_files.retry(f"gs://{bucket}", call)
    return headers


def check_clock(cfg: sections.TrainRecipe | None, instance: Instance | None) -> list[CheckResult]:
    """Check the clock against the server of a bucket, or else against the metadata server."""
    skew, reference = (instance.skew, "the metadata server's") if instance is not None else (None, "")
    for bucket in buckets_of(cfg)[:1]:
        with contextlib.suppress(UserError, OSError):
            skew, reference = clock_skew(read_headers(bucket).get("Date")), "that of the bucket's server"
    if skew is None:
        now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        return [CheckResult("ok", "clock", f"{now}; no server to compare with")]
    message = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} {reference}"
    fix = "timedatectl set-ntp true"
    if abs(skew) > BROKEN_SKEW:
        return [CheckResult("fail", "clock", f"{message}: tokens and certificates are refused", fix)]
    if abs(skew) > MAX_SKEW:
        return [CheckResult("warn", "clock", message, fix)]
    return [CheckResult("ok", "clock", f"within {MAX_SKEW:.0f} s of {reference}")]
