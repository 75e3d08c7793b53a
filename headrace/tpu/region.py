"""Where a bucket lies, beside where the slice is to be: traffic between regions surprises on a bill."""

from collections.abc import Sequence

from headrace.errors import UserError
from headrace.tpu import google_auth as google

# Regions of a continent, for buckets that are spread over one; and Google's ready-made pairs.
CONTINENTS = {"us": ("us-",), "eu": ("europe-",), "asia": ("asia-",)}
PAIRS = {
    "nam4": ("us-central1", "us-east1"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "asia1": ("asia-northeast1", "asia-northeast2"),
}


def check(urls: Sequence[str], zones: Sequence[str], *, allowed: bool) -> list[str]:
    """Warnings, where a bucket is near but not quite there. Refuses one of another region."""
    said = []
    for bucket in dict.fromkeys(url.split("/")[2] for url in urls if url.startswith("gs://")):
        where, parts = located(bucket, allowed=allowed)
        if not where:
            said.append(f"gs://{bucket}: you may not ask where it lies (storage.buckets.get)")
            continue
        for zone in zones:
            region = zone.rpartition("-")[0]
            if where == region or region in parts:
                continue
            if any(region.startswith(start) for start in CONTINENTS.get(where, ())):
                said.append(
                    f"gs://{bucket} is spread over {where.upper()}: reading from {region} is charged a little"
                )
                continue
            words = f"gs://{bucket} lies in {where}, the slice in {region}"
            if not allowed:
                raise UserError(f"{words}: every byte between them is charged for; --far-bucket allows it")
            said.append(f"{words}: every byte between them is charged for")
    return said


def located(bucket: str, *, allowed: bool) -> tuple[str, tuple[str, ...]]:
    """Its location by name, and the regions that make it up if there are two. Who may read a bucket need not
    be allowed to ask that: whoever does not mind goes on without."""
    url = google.storage()
    fields = "fields=location,customPlacementConfig"
    answer = google.ask(google.session(url), "GET", f"{url}/storage/v1/b/{bucket}?{fields}")
    if answer.status_code == 403 and allowed:
        return "", ()
    if answer.status_code == 403:
        raise UserError(
            f"gs://{bucket}: you may not ask where it lies, which the role Storage Legacy Bucket Reader lets "
            "you (storage.buckets.get); --far-bucket goes on without, wherever it is"
        )
    if answer.status_code != 200:
        raise UserError(
            f"gs://{bucket}: found {answer.status_code} {answer.reason}, expected a bucket to read"
        )
    told = answer.json()
    where = told["location"].lower()
    pair = told.get("customPlacementConfig", {}).get("dataLocations", ())
    return where, PAIRS.get(where) or tuple(region.lower() for region in pair)
