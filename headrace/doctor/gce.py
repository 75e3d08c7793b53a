"""Where a machine of Google's is, where buckets are, and what their clocks say. Traffic between regions is
charged: one user tells of 2,500 dollars before the first alert."""

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from headrace.config import sections
from headrace.storage import files as store
from headrace.doctor.report import Line
from headrace.errors import UserError

METADATA = "169.254.169.254"
WAIT = 1.0  # seconds: it answers at once or is not there
SKEW, BROKEN = 5.0, 60.0  # seconds that clocks may differ, and from which certificates and tokens fail


@dataclass(frozen=True)
class Instance:
    """A virtual machine, by its metadata server. `skew` is how many seconds our clock is ahead of its."""

    zone: str
    kind: str  # of accelerator, "" if none
    skew: float | None

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    @classmethod
    def find(cls) -> "Instance | None":
        zone, skew = metadata("instance/zone")
        if zone is None:
            return None
        kind, _ = metadata("instance/attributes/accelerator-type")
        return cls(zone.rpartition("/")[2], kind or "", skew)


def metadata(name: str) -> tuple[str | None, float | None]:
    """A value and how far our clock is ahead; nothing where there is no such server."""
    host = os.environ.get("GCE_METADATA_HOST") or METADATA
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/{name}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            if answer.headers.get("Metadata-Flavor") != "Google":  # anybody may answer at such an address
                return None, None
            return answer.read().decode().strip(), ahead(answer.headers.get("Date"))
    except (OSError, ValueError, urllib.error.URLError):
        return None, None


def ahead(date: str | None) -> float | None:
    """Servers tell the time in whole seconds."""
    return time.time() - parsedate_to_datetime(date).timestamp() - 0.5 if date else None


def buckets(cfg: sections.Run | None) -> list[str]:
    """Those that a recipe names."""
    paths = [] if cfg is None else [cfg.run, cfg.data.path, cfg.start or ""]
    return sorted({bucket_of(path) for path in paths if store.is_bucket(path)})


def bucket_of(path: str) -> str:
    return path.split("://")[1].partition("/")[0]


def regions(cfg: sections.Run | None, where: Instance | None) -> list[Line]:
    named = buckets(cfg)
    if where is None:
        told = "this is no machine of Google Cloud, which charges for what leaves it"
        return [Line("warn", "region", f"gs://{bucket}: {told}") for bucket in named]
    if not named:
        return [Line("ok", "region", f"this machine is in {where.zone}")]
    return [region(bucket, where) for bucket in named]


def region(bucket: str, where: Instance) -> Line:
    try:
        location = about(bucket)["location"].lower()
    except UserError as error:
        return Line("warn", "region", f"where {bucket} is could not be asked: {error}")
    except OSError as error:
        fix = "roles/storage.bucketViewer, or look with `gcloud storage buckets describe`"
        return Line("warn", "region", f"where {bucket} is may not be asked ({error})", fix)
    said = f"gs://{bucket} is in {location}, this machine in {where.zone}"
    if location == where.region:
        return Line("ok", "region", said)
    fix = f"gcloud storage buckets create gs://NAME --location={where.region}, and copy what is needed there"
    if location in ("us", "eu", "asia") and where.region.startswith({"eu": "europe"}.get(location, location)):
        return Line(
            "warn", "region", f"{said}: slower than a bucket in one region, and reading may cost", fix
        )
    return Line(
        "fail", "region", f"{said}: all that is read or written is charged as traffic between regions", fix
    )


def removals(cfg: sections.Run | None) -> list[Line]:
    """What a bucket makes of the checkpoints that a run removes, which are most of them."""
    if cfg is None or not store.is_bucket(cfg.run):
        return []
    bucket = bucket_of(cfg.run)
    try:
        kept = int(about(bucket).get("softDeletePolicy", {}).get("retentionDurationSeconds", 0))
    except (UserError, OSError):
        return []  # told with its region
    if not kept:
        return [Line("ok", "bucket", f"what is removed from gs://{bucket} is gone")]
    said = f"gs://{bucket} keeps what is removed for {kept / 86400:.0f} days, and charges for it: with every "
    said += "checkpoint of that time, many times what checkpoint.keep says"
    return [Line("warn", "bucket", said, f"gcloud storage buckets update gs://{bucket} --clear-soft-delete")]


def about(bucket: str) -> dict[str, Any]:
    files, _ = store.filesystem(f"gs://{bucket}")
    return store.ask(f"gs://{bucket}", lambda: json.loads(files.call("GET", "b/{}", bucket)[1]))


def clock(cfg: sections.Run | None, where: Instance | None) -> list[Line]:
    """Against a bucket's or the metadata server's."""
    skew, whose = (where.skew, "the metadata server's") if where is not None else (None, "")
    for bucket in buckets(cfg)[:1]:
        files, _ = store.filesystem(f"gs://{bucket}")
        with contextlib.suppress(UserError, OSError):
            headers, _ = store.ask(
                f"gs://{bucket}", partial(files.call, "GET", "b/{}/o", bucket, maxResults="1")
            )
            skew, whose = ahead(headers.get("Date")), "that of the bucket's server"
    if skew is None:
        return [Line("ok", "clock", f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}; no server to compare with")]
    said = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} {whose}"
    fix = "timedatectl set-ntp true"
    if abs(skew) > BROKEN:
        return [Line("fail", "clock", f"{said}: tokens and certificates are refused", fix)]
    if abs(skew) > SKEW:
        return [Line("warn", "clock", said, fix)]
    return [Line("ok", "clock", f"within {SKEW:.0f} s of {whose}")]
