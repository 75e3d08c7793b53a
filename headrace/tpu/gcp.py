"""Google's TPUs, through the client that Google makes: queued resources for everything, since they alone can
be spot, on demand, reserved and joined, and wait where there is none."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.tpu import google_auth as google
from headrace.tpu.cloud import IDLE, LABEL, OWNER, SECONDS, LoggedOut, Refused, Rented, Silent, State, user
from headrace.tpu.request import Request

TIMER = Path(__file__).with_name("timer.py")
UPDATE = 300.0  # seconds that a change of a node may take
VALID = 86400  # seconds that a request may wait: one that nobody remembers comes to nothing

STATES = {
    "CREATING": State.WAITING,
    "ACCEPTED": State.WAITING,
    "WAITING_FOR_RESOURCES": State.WAITING,
    "PROVISIONING": State.WAITING,
    "ACTIVE": State.READY,
    "SUSPENDING": State.LOST,
    "SUSPENDED": State.LOST,
    "FAILED": State.FAILED,
    "DELETING": State.DELETING,
}
# Of a machine; what is not here comes by itself (CREATING, STARTING, REPAIRING, RESTARTING, ...) or becomes
# one of them (STOPPING).
NODE_STATES = {
    "READY": State.READY,
    "PREEMPTED": State.LOST,
    "TERMINATED": State.LOST,
    "STOPPED": State.STOPPED,
    "DELETING": State.DELETING,
}


class Gcp:
    """One project, and the zones that are looked into: all of them, if none is named."""

    name = "gcp"

    def __init__(self, project: str, zones: tuple[str, ...] = (), patience: float = google.PATIENCE) -> None:
        google.credentials(google.address("TPU", google.TPU))  # says what to install, or to log in
        from google.api_core import exceptions
        from google.api_core.retry import Retry, if_exception_type
        from google.auth.exceptions import GoogleAuthError, TransportError
        from google.cloud import tpu_v2
        from google.protobuf.json_format import ParseError
        from requests.exceptions import ConnectionError, RequestException, Timeout

        self.api: Any = tpu_v2
        self.errors: Any = exceptions
        self.broken = (
            exceptions.InternalServerError,
            exceptions.BadGateway,
            exceptions.ServiceUnavailable,
            exceptions.GatewayTimeout,
            TransportError,
            ConnectionError,
            Timeout,
        )
        self.unknown = GoogleAuthError
        self.garbled = (ValueError, ParseError, RequestException)
        # The client repeats nothing by itself, not even after a 503.
        again = Retry(if_exception_type(*self.broken), initial=0.5, maximum=20, timeout=patience)
        self.how: dict[str, Any] = dict(retry=again, timeout=60)
        self.project, self.scope, self.zones = project, project, zones
        self.without: set[tuple[str, str]] = set()  # zones that had none of a name when they last answered
        self.last: dict[str, str] = {}  # where one of a name was seen last
        self.log_in()

    def log_in(self) -> None:
        """With what is on disk now: who has logged in again meanwhile has other credentials there."""
        url = google.address("TPU", google.TPU)
        credentials, _ = google.credentials(url)
        self.client = self.api.TpuClient(
            transport="rest", credentials=credentials, client_options={"api_endpoint": url}
        )

    def find(self, name: str, zone: str = "") -> Rented | None:
        """A zone that does not answer hides nothing of the others, nor of itself if it had none when it last
        answered and was asked for none since. Where only one zone matters, it is asked alone."""
        if not zone and not self.zones:
            every, silent = self.survey()
            found = next((one for one in every if one.name == name), None)
            if found is None and silent:
                raise silent_zones(silent)
            return found
        answered, doubtful = False, None
        for where in (zone,) if zone else sorted(self.zones, key=lambda one: one != self.last.get(name)):
            try:
                found = next((one for one in self.within(where) if one.name == name), None)
            except LoggedOut:
                raise
            except (Silent, Refused) as why:
                doubtful = why if zone or (where, name) not in self.without else doubtful
                continue
            answered = True
            if found is not None:
                self.last[name] = where
                self.without.discard((where, name))
                return found
            self.without.add((where, name))
        if doubtful is None and not answered:
            raise Silent(f"Google Cloud: {', '.join(self.zones)}: no answer")
        if doubtful is not None:
            raise doubtful
        return None

    def survey(self) -> tuple[list[Rented], dict[str, str]]:
        """What there is, and the zones that do not answer, with what they say instead."""
        if self.zones:
            return self.each(self.zones)
        try:
            return self.listed("-")
        except (Silent, Refused):
            raise
        except UserError:  # the documentation has this wildcard for nodes alone
            with self.asking():
                wanted = dict(name=f"projects/{self.project}")
                answer = self.client.list_locations(request=wanted, **self.how)
            return self.each([place.location_id for place in answer.locations])

    def each(self, zones: Sequence[str]) -> tuple[list[Rented], dict[str, str]]:
        silent = {}

        def one(zone: str) -> list[Rented]:
            try:
                return self.within(zone)
            except LoggedOut:
                raise
            except (Silent, Refused) as why:
                silent[zone] = str(why)
                return []

        with ThreadPoolExecutor(8) as pool:
            found = list(itertools.chain.from_iterable(pool.map(one, zones)))
        return found, silent

    def within(self, zone: str) -> list[Rented]:
        """All of one zone, or an exception."""
        found, silent = self.listed(zone)
        if silent:
            raise silent_zones(silent)
        return found

    def listed(self, zone: str) -> tuple[list[Rented], dict[str, str]]:
        """Google leaves out what it does not reach, and says so beside the list alone."""
        parent = f"projects/{self.project}/locations/{zone}"
        with self.asking():
            queued, lost = whole(
                self.client.list_queued_resources(parent=parent, **self.how), "queued_resources"
            )
            nodes, lost_too = whole(self.client.list_nodes(parent=parent, **self.how), "nodes")
        silent = {zone: "Google does not reach it" for zone in sorted(lost | lost_too)}
        found = [self.queued(one, {node.name: node for node in nodes}) for one in queued]
        found += [self.node(node) for node in nodes if not node.queued_resource]
        return [one for one in found if one.zone not in silent], silent

    def queued(self, one: Any, nodes: dict[str, Any]) -> Rented:
        said = one.state.state.name
        spec = one.tpu.node_spec[0]
        own = [node for node in nodes.values() if same(node.queued_resource, one.name)]
        own.sort(key=lambda node: (len(node.name), node.name))  # -2 before -10
        state = STATES.get(said, State.WAITING)
        expected = spec.multislice_params.node_count or 1
        if state is State.READY:
            for node in own:
                if node.state.name != "READY":
                    state, said = NODE_STATES.get(node.state.name, State.WAITING), node.state.name
                    break
            if len(own) < expected:
                state, said = State.LOST, f"ACTIVE, but {expected - len(own)} of {expected} nodes are gone"
        if state is State.FAILED and one.state.failed_data.error.message:
            said = f"FAILED: {one.state.failed_data.error.message}"
        return Rented(
            name=one.name.rpartition("/")[2],
            zone=one.name.split("/")[3],
            accelerator=spec.node.accelerator_type,
            terms="spot" if "spot" in one else "reserved" if one.reservation_name else "on-demand",
            state=state,
            said=said,
            workers=tuple(itertools.chain.from_iterable(map(addresses, own))),
            created=min(births(own), default=0.0),
            births=births(own),
            labels=dict(own[0].labels if own else spec.node.labels),
            slices=expected,
            disks=disks(own[0] if own else spec.node),
        )

    def node(self, node: Any) -> Rented:
        said = node.state.name
        return Rented(
            name=node.name.rpartition("/")[2],
            zone=node.name.split("/")[3],
            accelerator=node.accelerator_type,
            terms=terms(node.scheduling_config),
            state=NODE_STATES.get(said, State.WAITING),
            said=said,
            workers=tuple(addresses(node)),
            created=min(births([node]), default=0.0),
            births=births([node]),
            labels=dict(node.labels),
            single=True,
            disks=disks(node),
        )

    def create(self, request: Request, zone: str, seconds: float, idle: float | None) -> None:
        parent = f"projects/{self.project}/locations/{zone}"
        spec: dict[str, Any] = dict(parent=parent, node=self.described(request, zone, seconds, idle))
        if request.slice.slices > 1:
            spec["multislice_params"] = dict(node_count=request.slice.slices, node_id_prefix=request.name)
        else:
            spec["node_id"] = request.name
        body: dict[str, Any] = dict(tpu=dict(node_spec=[spec]))
        if request.terms == "spot":
            body["spot"] = {}
        elif request.terms == "reserved":
            body["reservation_name"] = f"{parent}/reservations/-"
        else:
            body["guaranteed"] = {}
        body["queueing_policy"] = dict(valid_until_duration=f"{VALID}s")
        wanted = dict(parent=parent, queued_resource_id=request.name, queued_resource=body)
        self.without.discard((zone, request.name))
        with self.asking(), contextlib.suppress(self.errors.Conflict):  # asked before, and not heard
            self.client.create_queued_resource(request=wanted, **self.how)

    def described(self, request: Request, zone: str, seconds: float, idle: float | None) -> dict[str, Any]:
        """A node, with the timer that ends it: started by the machine itself, whatever becomes of us."""
        network = dict(network="default", enable_external_ips=not request.internal)
        node: dict[str, Any] = dict(
            accelerator_type=request.accelerator,
            runtime_version=request.image,
            labels=labels(seconds, idle),
            metadata=metadata(self.project, request, zone, seconds, idle),
            network_config=network,
            service_account=dict(scope=[google.SCOPE]),
        )
        if request.disks:
            read = self.api.AttachedDisk.DiskMode.READ_ONLY
            node["data_disks"] = [
                dict(source_disk=disk_source(self.project, zone, disk), mode=read) for disk in request.disks
            ]
        return node

    def extend(self, rented: Rented, seconds: float, idle: float | None) -> None:
        """Written where the timer reads it, and into the label that shows it. That it was accepted does not
        mean that it is done."""
        for node in self.nodes(rented):
            node.labels[SECONDS] = node.metadata[SECONDS] = str(int(seconds))
            node.labels[IDLE] = node.metadata[IDLE] = str(int(idle or 0))
            self.update(node, "labels", "metadata")

    def update(self, node: Any, *fields: str) -> None:
        with self.asking():
            wanted = dict(node=node, update_mask={"paths": list(fields)})
            self.client.update_node(request=wanted, **self.how).result(timeout=UPDATE)

    def nodes(self, rented: Rented) -> list[Any]:
        parent = f"projects/{self.project}/locations/{rented.zone}"
        with self.asking():
            nodes, silent = whole(self.client.list_nodes(parent=parent, **self.how), "nodes")
        if silent:
            raise silent_zones(silent)
        asked, alone = f"{parent}/queuedResources/{rented.name}", f"{parent}/nodes/{rented.name}"
        return [node for node in nodes if same(node.queued_resource, asked) or same(node.name, alone)]

    def delete(self, rented: Rented) -> None:
        parent = f"projects/{self.project}/locations/{rented.zone}"
        with self.asking(), contextlib.suppress(self.errors.NotFound):
            if rented.single:
                self.client.delete_node(name=f"{parent}/nodes/{rented.name}", **self.how)
                return
            wanted = dict(name=f"{parent}/queuedResources/{rented.name}", force=True)
            self.client.delete_queued_resource(request=wanted, **self.how)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Tells the kinds of bad answers apart: try elsewhere, try later, log in, put it right."""
        try:
            yield
        except self.errors.TooManyRequests as error:
            raise Refused(error.message, quota="quota" in error.message.lower()) from None
        except (*self.broken, self.errors.RetryError, TimeoutError) as error:
            raise Silent(" ".join(str(error).split())[:300]) from None
        except self.unknown as error:  # it was known when we began, and can be again
            with contextlib.suppress(UserError):
                self.log_in()
            raise LoggedOut(google.logged_out(error)) from None
        except self.errors.GoogleAPICallError as error:
            if "recondition" in f"{error.message} {getattr(error, 'reason', '')}":  # busy with something else
                raise Silent(error.message) from None
            raise UserError(f"Google Cloud: {error.message}") from None
        except self.garbled as error:  # what a proxy says in place of an answer
            raise Silent(f"Google Cloud: found {' '.join(str(error).split())[:200]}") from None


def whole(pager: Any, field: str) -> tuple[list[Any], set[str]]:
    """What all pages of a list have, and the zones that it lacks."""
    found, lacking = [], set()
    for page in pager.pages:
        found += getattr(page, field)
        lacking |= {place.rpartition("/")[2] for place in page.unreachable}
    return found, lacking


def silent_zones(zones: Iterable[str]) -> Silent:
    return Silent(f"Google Cloud does not reach {', '.join(zones)}: what is there is not known")


def terms(scheduling: Any) -> str:
    """Of a node that belongs to no queued resource."""
    if scheduling.spot or scheduling.preemptible:
        return "spot"
    return "reserved" if scheduling.reserved else "on-demand"


def same(one: str, other: str) -> bool:
    """Whether two names mean one thing. Google calls a project by its name here and by its number there."""
    return bool(one) and one.split("/")[-4:] == other.split("/")[-4:]


def disks(node: Any) -> tuple[str, ...]:
    return tuple(disk.source_disk.rpartition("/")[2] for disk in node.data_disks)


def addresses(node: Any) -> list[str]:
    return [end.access_config.external_ip or end.ip_address for end in node.network_endpoints]


def births(nodes: Iterable[Any]) -> frozenset[float]:
    return frozenset(node.create_time.timestamp() for node in nodes if node.create_time)


def labels(seconds: float, idle: float | None) -> dict[str, str]:
    return {LABEL: "yes", OWNER: user(), SECONDS: str(int(seconds)), IDLE: str(int(idle or 0))}


def metadata(project: str, request: Request, zone: str, seconds: float, idle: float | None) -> dict[str, str]:
    """What the machines can read of themselves; nothing in it is secret."""
    found = {
        "startup-script": TIMER.read_text(),
        "headrace-resource": f"projects/{project}/locations/{zone}/queuedResources/{request.name}",
        SECONDS: str(int(seconds)),
        IDLE: str(int(idle or 0)),
    }
    if request.public_key:
        found["ssh-keys"] = request.public_key
    return found


def disk_source(project: str, zone: str, disk: str) -> str:
    return f"projects/{project}/zones/{zone}/disks/{disk}"
