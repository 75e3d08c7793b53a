"""The region of a bucket against the zone of a slice: traffic between regions costs money."""

from collections.abc import Sequence

from headrace.errors import UserError
from headrace.tpu import google_auth

# Prefixes of the regions of a multi-region, and Google's predefined dual-regions.
CONTINENTS = {"us": ("us-",), "eu": ("europe-",), "asia": ("asia-",)}
DUAL_REGIONS = {
    "nam4": ("us-central1", "us-east1"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "asia1": ("asia-northeast1", "asia-northeast2"),
}


def check_bucket_regions(urls: Sequence[str], zones: Sequence[str], *, allow_far: bool) -> list[str]:
    """Compare the buckets of some URLs with the zones of a slice, and return warnings about extra charges.
    Raises UserError for a bucket in another region, unless `allow_far` is set."""
    warnings = []
    for bucket in dict.fromkeys(url.split("/")[2] for url in urls if url.startswith("gs://")):
        location, regions = find_bucket_location(bucket, allow_unknown=allow_far)
        if not location:
            warnings.append(f"gs://{bucket}: its location is unknown: you lack storage.buckets.get")
            continue
        for zone in zones:
            region = zone.rpartition("-")[0]
            if location == region or region in regions:
                continue
            if any(region.startswith(prefix) for prefix in CONTINENTS.get(location, ())):
                spread = f"gs://{bucket} is spread over {location.upper()}"
                warnings.append(f"{spread}: reading from {region} costs a little")
                continue
            distance = f"gs://{bucket} is in {location}, the slice in {region}"
            if not allow_far:
                raise UserError(f"{distance}: all traffic between them is charged; --far-bucket allows it")
            warnings.append(f"{distance}: all traffic between them is charged")
    return warnings


def find_bucket_location(bucket: str, *, allow_unknown: bool) -> tuple[str, tuple[str, ...]]:
    """The location of a bucket, in lowercase, and for a dual-region its two regions.

    A user who may read a bucket need not be allowed to look up its location. Then, with `allow_unknown`, both
    values are empty; otherwise UserError is raised."""
    url = google_auth.storage_url()
    fields = "fields=location,customPlacementConfig"
    session = google_auth.open_session(url)
    response = google_auth.send_with_retries(session, "GET", f"{url}/storage/v1/b/{bucket}?{fields}")
    if response.status_code == 403 and allow_unknown:
        return "", ()
    if response.status_code == 403:
        raise UserError(
            f"gs://{bucket}: you may not look up its location; the role Storage Legacy Bucket Reader "
            "(storage.buckets.get) allows it, --far-bucket continues without, wherever the bucket is"
        )
    if response.status_code != 200:
        raise UserError(
            f"gs://{bucket}: found {response.status_code} {response.reason}, expected a readable bucket"
        )
    metadata = response.json()
    location = metadata["location"].lower()
    regions = metadata.get("customPlacementConfig", {}).get("dataLocations", ())
    return location, DUAL_REGIONS.get(location) or tuple(region.lower() for region in regions)
