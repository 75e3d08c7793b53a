"""Google's TPUs, through Google's client library.

Everything is requested as a queued resource: only these can be spot, on demand, reserved or joined, and wait
until there are TPUs. The API lists requests (queued resources) and machines (nodes) separately."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.tpu import google_auth
from headrace.tpu.cloud import (
    MANAGED_LABEL,
    OWNER_LABEL,
    CloudRefused,
    CloudUnreachable,
    CredentialsExpired,
    Slice,
    current_user_label,
    limit_labels,
)
from headrace.tpu.gcp_slices import is_same_resource, node_to_slice, to_slice
from headrace.tpu.request import Request

if TYPE_CHECKING:
    from google.cloud.tpu_v2 import Node

TIMER_SCRIPT = Path(__file__).with_name("timer.py")
UPDATE_TIMEOUT = 300.0  # seconds for a change of a node to be done
REQUEST_VALIDITY = 86400  # seconds after which Google drops a request that still waits


class Gcp:
    """The `Cloud` of one Google Cloud project, restricted to some zones if they are given."""

    name = "gcp"

    def __init__(
        self, project: str, zones: tuple[str, ...] = (), retry_seconds: float = google_auth.RETRY_SECONDS
    ) -> None:
        # First, since its error says what to install or how to log in.
        google_auth.load_credentials(google_auth.api_url("TPU", google_auth.TPU))
        from google.api_core import exceptions
        from google.api_core.retry import Retry, if_exception_type
        from google.auth.exceptions import GoogleAuthError, TransportError
        from google.cloud import tpu_v2
        from google.protobuf.json_format import ParseError
        from requests.exceptions import ConnectionError, RequestException, Timeout

        self.api: ModuleType = tpu_v2
        self.errors: ModuleType = exceptions
        self.outage_errors = (
            exceptions.InternalServerError,
            exceptions.BadGateway,
            exceptions.ServiceUnavailable,
            exceptions.GatewayTimeout,
            TransportError,
            ConnectionError,
            Timeout,
        )
        self.auth_error = GoogleAuthError
        self.malformed_errors = (ValueError, ParseError, RequestException)
        # The client retries nothing by default, not even a 503.
        retry = Retry(if_exception_type(*self.outage_errors), initial=0.5, maximum=20, timeout=retry_seconds)
        self.call_options: dict[str, Any] = dict(retry=retry, timeout=60)
        self.project, self.scope, self.zones = project, project, zones
        self.last_zone: dict[str, str] = {}  # where a slice of this name was last found
        self.searched: set[tuple[str, str]] = set()  # (zone, name) that had none at its last answer
        self.log_in()

    def log_in(self) -> None:
        """Open the client with the credentials that are on disk now: the user may have logged in again."""
        url = google_auth.api_url("TPU", google_auth.TPU)
        credentials, _ = google_auth.load_credentials(url)
        self.client = self.api.TpuClient(
            transport="rest", credentials=credentials, client_options={"api_endpoint": url}
        )

    def find(self, name: str, zone: str = "") -> Slice | None:
        """Look up a slice by name. Raises CloudUnreachable if it may be in a zone that does not answer.

        A zone that had none of this name when it last answered, and was sent no request since, is assumed to
        still have none. With `zone` only that zone is searched."""
        if not zone and not self.zones:
            slices, unreachable = self.list_slices()
            match = next((slice_ for slice_ in slices if slice_.name == name), None)
            if match is None and unreachable:
                raise unreachable_error(unreachable)
            return match
        has_answer, last_error = False, None
        for candidate in (zone,) if zone else self.zones_to_search(name):
            try:
                slices = self.list_slices_in_zone(candidate)
            except CredentialsExpired:
                raise
            except (CloudUnreachable, CloudRefused) as error:
                if zone or (candidate, name) not in self.searched:
                    last_error = error
                continue
            has_answer = True
            for slice_ in slices:
                if slice_.name == name:
                    self.last_zone[name] = candidate
                    self.searched.discard((candidate, name))
                    return slice_
            self.searched.add((candidate, name))
        if last_error is not None:
            raise last_error
        if not has_answer:
            raise CloudUnreachable(f"Google Cloud: {', '.join(self.zones)}: no answer")
        return None

    def zones_to_search(self, name: str) -> list[str]:
        """The zones to search, the one where the slice was last found first."""
        return sorted(self.zones, key=lambda zone: zone != self.last_zone.get(name))

    def list_slices(self) -> tuple[list[Slice], dict[str, str]]:
        """List the slices of all zones. The second value names the zones that did not answer, with the
        reason."""
        if self.zones:
            return self.list_slices_in_zones(self.zones)
        try:
            return self.list_slices_in_location("-")
        except (CloudUnreachable, CloudRefused):
            raise
        except UserError:  # Google documents this wildcard for nodes only
            with self.translate_errors():
                request = dict(name=f"projects/{self.project}")
                answer = self.client.list_locations(request=request, **self.call_options)
            return self.list_slices_in_zones([location.location_id for location in answer.locations])

    def list_slices_in_zones(self, zones: Sequence[str]) -> tuple[list[Slice], dict[str, str]]:
        """List the slices of some zones in parallel, see `list_slices`."""
        unreachable = {}

        def list_or_note(zone: str) -> list[Slice]:
            try:
                return self.list_slices_in_zone(zone)
            except CredentialsExpired:
                raise
            except (CloudUnreachable, CloudRefused) as error:
                unreachable[zone] = str(error)
                return []

        with ThreadPoolExecutor(8) as pool:
            slices = list(itertools.chain.from_iterable(pool.map(list_or_note, zones)))
        return slices, unreachable

    def list_slices_in_zone(self, zone: str) -> list[Slice]:
        """List the slices of one zone. Raises CloudUnreachable if the list may be incomplete."""
        slices, unreachable = self.list_slices_in_location(zone)
        if unreachable:
            raise unreachable_error(unreachable)
        return slices

    def list_slices_in_location(self, location: str) -> tuple[list[Slice], dict[str, str]]:
        """List the slices of a zone, or of all with `-`. Google omits what it cannot reach, and names those
        zones in a separate field only."""
        parent = f"projects/{self.project}/locations/{location}"
        with self.translate_errors():
            answer = self.client.list_queued_resources(parent=parent, **self.call_options)
            queued, zones = read_pages(answer, "queued_resources")
            nodes, more_zones = self.list_nodes(parent)
        unreachable = {zone: "Google does not reach it" for zone in sorted(zones | more_zones)}
        slices = [to_slice(request, nodes) for request in queued]
        slices += [node_to_slice(node) for node in nodes if not node.queued_resource]
        return [slice_ for slice_ in slices if slice_.zone not in unreachable], unreachable

    def list_nodes(self, parent: str) -> "tuple[list[Node], set[str]]":
        """List the nodes of a location, and the zones that are missing from the list."""
        return read_pages(self.client.list_nodes(parent=parent, **self.call_options), "nodes")

    def create(self, request: Request, zone: str, time_limit: float, idle_limit: float | None) -> None:
        """Request a slice with its timer. Does nothing if an earlier call, whose answer was lost, did so."""
        parent = f"projects/{self.project}/locations/{zone}"
        node = self.describe_node(request, zone, time_limit, idle_limit)
        spec: dict[str, Any] = dict(parent=parent, node=node)
        if request.slice.slices > 1:
            spec["multislice_params"] = dict(node_count=request.slice.slices, node_id_prefix=request.name)
        else:
            spec["node_id"] = request.name
        resource: dict[str, Any] = dict(tpu=dict(node_spec=[spec]))
        if request.terms == "spot":
            resource["spot"] = {}
        elif request.terms == "reserved":
            resource["reservation_name"] = f"{parent}/reservations/-"
        else:
            resource["guaranteed"] = {}
        resource["queueing_policy"] = dict(valid_until_duration=f"{REQUEST_VALIDITY}s")
        call = dict(parent=parent, queued_resource_id=request.name, queued_resource=resource)
        self.searched.discard((zone, request.name))
        with self.translate_errors(), contextlib.suppress(self.errors.Conflict):
            self.client.create_queued_resource(request=call, **self.call_options)

    def describe_node(
        self, request: Request, zone: str, time_limit: float, idle_limit: float | None
    ) -> dict[str, Any]:
        """The description of a node. Its startup script is the timer, so that the machines start it by
        themselves, whatever becomes of the launcher."""
        node: dict[str, Any] = dict(
            accelerator_type=request.accelerator,
            runtime_version=request.image,
            labels=make_labels(time_limit, idle_limit),
            metadata=make_metadata(self.project, request, zone, time_limit, idle_limit),
            network_config=dict(network="default", enable_external_ips=not request.internal_ips),
            service_account=dict(scope=[google_auth.SCOPE]),
        )
        if request.disks:
            mode = self.api.AttachedDisk.DiskMode.READ_ONLY
            node["data_disks"] = [
                dict(source_disk=disk_path(self.project, zone, disk), mode=mode) for disk in request.disks
            ]
        return node

    def set_timer(self, slice_: Slice, time_limit: float, idle_limit: float | None) -> None:
        """Set the limits of a slice: in the metadata, which the timer reads, and in the labels. Waits until
        the change is done, since Google may accept it and then fail."""
        limits = limit_labels(time_limit, idle_limit)
        for node in self.nodes_of(slice_):
            for key, value in limits.items():
                node.labels[key] = node.metadata[key] = value
            self.update_node(node, "labels", "metadata")

    def update_node(self, node: "Node", *fields: str) -> None:
        """Store changed fields of a node, and wait until that is done."""
        with self.translate_errors():
            call = dict(node=node, update_mask={"paths": list(fields)})
            self.client.update_node(request=call, **self.call_options).result(timeout=UPDATE_TIMEOUT)

    def nodes_of(self, slice_: Slice) -> "list[Node]":
        """The nodes of a slice."""
        parent = f"projects/{self.project}/locations/{slice_.zone}"
        with self.translate_errors():
            nodes, unreachable = self.list_nodes(parent)
        if unreachable:
            raise unreachable_error(unreachable)
        request, standalone = f"{parent}/queuedResources/{slice_.name}", f"{parent}/nodes/{slice_.name}"
        return [
            node
            for node in nodes
            if is_same_resource(node.queued_resource, request) or is_same_resource(node.name, standalone)
        ]

    def delete(self, slice_: Slice) -> None:
        """Request the deletion of a slice."""
        parent = f"projects/{self.project}/locations/{slice_.zone}"
        with self.translate_errors(), contextlib.suppress(self.errors.NotFound):
            if slice_.is_standalone:
                self.client.delete_node(name=f"{parent}/nodes/{slice_.name}", **self.call_options)
                return
            call = dict(name=f"{parent}/queuedResources/{slice_.name}", force=True)
            self.client.delete_queued_resource(request=call, **self.call_options)

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Context manager: turn Google's errors into those of `Cloud`, by what helps: another zone
        (CloudRefused), another time (CloudUnreachable), a login (CredentialsExpired), or the user
        (UserError)."""
        try:
            yield
        except self.errors.TooManyRequests as error:
            raise CloudRefused(error.message, is_quota="quota" in error.message.lower()) from None
        except (*self.outage_errors, self.errors.RetryError, TimeoutError) as error:
            raise CloudUnreachable(" ".join(str(error).split())[:300]) from None
        except self.auth_error as error:
            with contextlib.suppress(UserError):
                self.log_in()
            raise CredentialsExpired(google_auth.format_login_error(error)) from None
        except self.errors.GoogleAPICallError as error:
            details = f"{error.message} {getattr(error, 'reason', '')}"
            if "recondition" in details:  # "Failed precondition": the resource is busy
                raise CloudUnreachable(error.message) from None
            raise UserError(f"Google Cloud: {error.message}") from None
        except self.malformed_errors as error:  # for example the error page of a proxy
            raise CloudUnreachable(f"Google Cloud: found {' '.join(str(error).split())[:200]}") from None


def read_pages(pager: Any, field: str) -> tuple[list[Any], set[str]]:
    """Collect the items of a list over its pages, and the zones that Google could not reach for it."""
    pages = list(pager.pages)
    items = [item for page in pages for item in getattr(page, field)]
    return items, {name.rpartition("/")[2] for page in pages for name in page.unreachable}


def unreachable_error(zones: Iterable[str]) -> CloudUnreachable:
    """The error for zones that Google does not reach."""
    return CloudUnreachable(f"Google Cloud does not reach {', '.join(zones)}: its slices are unknown")


def make_labels(time_limit: float, idle_limit: float | None) -> dict[str, str]:
    """The labels of a slice that Headrace requests."""
    return {MANAGED_LABEL: "yes", OWNER_LABEL: current_user_label()} | limit_labels(time_limit, idle_limit)


def make_metadata(
    project: str, request: Request, zone: str, time_limit: float, idle_limit: float | None
) -> dict[str, str]:
    """The metadata of a slice, which its machines can read. Nothing in it is secret."""
    resource = f"projects/{project}/locations/{zone}/queuedResources/{request.name}"
    metadata = {"startup-script": TIMER_SCRIPT.read_text(), "headrace-resource": resource}
    metadata |= limit_labels(time_limit, idle_limit)
    if request.public_key:
        metadata["ssh-keys"] = request.public_key
    return metadata


def disk_path(project: str, zone: str, disk: str) -> str:
    """The full name of a data disk."""
    return f"projects/{project}/zones/{zone}/disks/{disk}"
