"""What an object storage is told: options, endpoints and credentials, from a URI and the environment.

Parsed once when a storage is opened; adapters receive `ClientSettings` and look nowhere else. Invariant:
secrets are in `Credentials` alone, which neither `repr` nor the record of options ever shows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from penstock.environment import Environment
from penstock.errors import Unavailable, UsageError
from penstock.storage.objects.part_cutter import MIN_PART_BYTES
from penstock.storage.protocol import OptionValue
from penstock.storage.uri import Location, parse_options

ClientName = Literal["obstore", "minio", "s3dlio", "s3torchconnector"]
Payload = Literal["unsigned", "signed"]

_RANGE = re.compile(r"\{(\d+)\.\.\.(\d+)\}")
_MAX_ENDPOINTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectOptions:
    """How to move objects. All of it is recorded with every result."""

    client: ClientName = "obstore"
    """The library that speaks to the service; `gs://` and `az://` have `obstore` alone."""
    part_bytes: int = 8 * 1024 * 1024
    """Larger objects go up in parts of this size: more where the object has more than 10,000 of them, and a
    neighbouring size where a buffer then needs no cutting off."""
    parts_in_flight: int = 8
    """Parts of one object that are under way at once: so many buffers a sink holds."""
    range_bytes: int = 8 * 1024 * 1024
    """Larger reads are split into ranges of this size."""
    ranges_in_flight: int = 8
    """Ranges of large reads that are under way at once, over all readers of one storage."""
    endpoints: tuple[str, ...] = ()
    """URLs or templates such as `http://10.0.0.{1...8}:9000`; empty: from the environment."""
    region: str = ""
    path_style: bool = True
    """Buckets in the path of a URL; false: in its host name."""
    tls_verify: bool = True
    payload: Payload = "unsigned"
    """Whether the signature covers the bytes of an object. Over https TLS protects them already, and over
    plain http SHA-256 is 7 times slower than the network, so it would be what one measures: hence `unsigned`.
    On an http network that one does not trust, say `signed`."""
    attempts: int = 5
    """How often a request is sent before its failure is final."""
    backoff_s: float = 0.1
    """The wait before the second attempt; it doubles with each, with jitter, up to 20 s."""
    request_timeout_s: float = 60.0
    """The limit for one request, its body included."""

    def __post_init__(self) -> None:
        least = {"attempts": 1, "parts_in_flight": 1, "ranges_in_flight": 1, "range_bytes": 4096}
        for name, minimum in {**least, "part_bytes": MIN_PART_BYTES}.items():
            if getattr(self, name) < minimum:
                raise UsageError(
                    f"{name} is {getattr(self, name)}, below its least value {minimum}",
                    fix="S3 refuses parts under 5 MiB." if name == "part_bytes" else f"Raise {name}.",
                )
        if self.backoff_s < 0 or self.request_timeout_s <= 0:
            raise UsageError("backoff_s is negative or request_timeout_s is not above zero")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who asks. Only the adapters read the fields."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """All that one adapter needs to speak to one endpoint."""

    scheme: str
    endpoint: str
    """The service's URL without the bucket; empty where the client knows it (`gs://`, `az://`)."""
    bucket: str
    credentials: Credentials
    options: ObjectOptions
    ca_bundle: str = ""
    """Path of a PEM file with further trusted authorities; empty: the system's."""

    @property
    def uses_tls(self) -> bool:
        """Whether requests are encrypted."""
        return not self.endpoint.startswith("http://")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectLocation:
    """An opened location: where the objects are and how to reach them. One `ClientSettings` an endpoint."""

    uri: str
    bucket: str
    prefix: str
    options: ObjectOptions
    clients: tuple[ClientSettings, ...]

    def record(self) -> Mapping[str, OptionValue]:
        """Every option with its resolved value; no secret."""
        return asdict(self.options)


def resolve_location(location: Location, environment: Environment) -> ObjectLocation:
    """The place that `location` names, with everything taken from the environment that it leaves open."""
    options = parse_options(ObjectOptions, location.options, where=location.uri)
    bucket, _, prefix = location.root.partition("/")
    if location.scheme != "s3" and options.client != "obstore":
        raise UsageError(
            f"The client {options.client} speaks S3 alone",
            where=location.uri,
            fix=f"For {location.scheme}:// use client=obstore.",
        )
    region = options.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION", "")
    urls = _endpoints(options.endpoints, region, location, environment)
    resolved = ObjectOptions(
        **{
            **asdict(options),
            "endpoints": tuple(url for url in urls if url),
            "region": region or "us-east-1",
        }
    )
    credentials = _CREDENTIALS[location.scheme](location.uri, environment)
    clients = tuple(
        ClientSettings(
            scheme=location.scheme,
            endpoint=url,
            bucket=bucket,
            credentials=credentials,
            options=resolved,
            ca_bundle=_ca_bundle(environment),
        )
        for url in urls
    )
    return ObjectLocation(uri=location.uri, bucket=bucket, prefix=prefix, options=resolved, clients=clients)


def _ca_bundle(environment: Environment) -> str:
    path = environment.get("AWS_CA_BUNDLE", "")
    if not path:
        return ""
    try:
        has_certificate = b"-----BEGIN CERTIFICATE-----" in Path(path).read_bytes()
    except OSError as error:
        raise Unavailable(
            f"AWS_CA_BUNDLE cannot be read: {error.strerror}", where=path, fix="Correct or unset it."
        ) from error
    if not has_certificate:
        raise Unavailable("AWS_CA_BUNDLE holds no PEM certificate", where=path, fix="Correct or unset it.")
    return path


def _endpoints(
    templates: tuple[str, ...], region: str, location: Location, environment: Environment
) -> tuple[str, ...]:
    if templates and location.scheme == "gs":
        raise UsageError(
            "gs:// has no endpoints to choose from",
            where=location.uri,
            fix="An emulator's address goes into the service account's file, as gcs_base_url.",
        )
    if templates:
        return expand_endpoints(templates)
    if location.scheme != "s3":
        return ("",)
    url = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL", "")
    if url:
        return expand_endpoints((url,))
    if not region:
        raise Unavailable(
            "No S3 endpoint is known",
            where=location.uri,
            fix="Set AWS_ENDPOINT_URL (or the option endpoints=http://host:port); "
            "for Amazon, set AWS_REGION.",
        )
    return (f"https://s3.{region}.amazonaws.com",)


def expand_endpoints(templates: tuple[str, ...]) -> tuple[str, ...]:
    """The URLs that `templates` stand for, each once: `{1...8}` counts, several of them multiply."""
    urls = dict.fromkeys(
        check_endpoint(url) for template in templates for url in _expand_template(template.strip())
    )
    return tuple(urls)


def _expand_template(template: str) -> Iterator[str]:
    pieces = _RANGE.split(template)
    spans = [_span(template, first, last) for first, last in zip(pieces[1::3], pieces[2::3], strict=True)]
    total = 1
    for span in spans:
        total *= len(span)
    if total > _MAX_ENDPOINTS:
        raise UsageError(f"{template!r} stands for {total} endpoints", fix=f"At most {_MAX_ENDPOINTS} work.")
    for numbers in itertools.product(*spans):
        yield pieces[0] + "".join(
            number + literal for number, literal in zip(numbers, pieces[3::3], strict=True)
        )


def _span(template: str, first: str, last: str) -> list[str]:
    if int(first) > int(last):
        raise UsageError(
            f"{template!r} counts from {first} down to {last}", fix="Put the smaller number first."
        )
    width = len(first) if first.startswith("0") else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]


def check_endpoint(url: str) -> str:
    """`url` without a closing slash, if it is `http(s)://host[:port]`."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            "An endpoint contains a user name or password",
            fix="Give credentials as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
    wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/")
    if wrong or parts.query or parts.fragment or "{" in url:
        raise UsageError(
            f"{url!r} is no endpoint",
            fix="Write http://host:port or https://host; templates count as in {1...8}.",
        )
    return url.rstrip("/")


def _s3_credentials(uri: str, environment: Environment) -> Credentials:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise Unavailable(
            f"No S3 credentials: {' and '.join(missing)} not set",
            where=uri,
            fix="Export them; profiles and instance roles are not asked, so that nothing waits for them.",
        )
    key, secret = (environment[name] for name in names)
    return Credentials(key, secret, environment.get("AWS_SESSION_TOKEN", ""))


def _google_credentials(uri: str, environment: Environment) -> Credentials:
    path = environment.get("GOOGLE_APPLICATION_CREDENTIALS") or environment.get("GOOGLE_SERVICE_ACCOUNT")
    if not path:
        raise Unavailable(
            "No Google credentials: GOOGLE_APPLICATION_CREDENTIALS is not set",
            where=uri,
            fix="Set it to the path of a service account's JSON key.",
        )
    return Credentials(path, "")


def _azure_credentials(uri: str, environment: Environment) -> Credentials:
    account = environment.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    key = environment.get("AZURE_STORAGE_ACCOUNT_KEY", "")
    token = environment.get("AZURE_STORAGE_SAS_TOKEN", "")
    if not account or not (key or token):
        raise Unavailable(
            "No Azure credentials: AZURE_STORAGE_ACCOUNT_NAME and one of AZURE_STORAGE_ACCOUNT_KEY and "
            "AZURE_STORAGE_SAS_TOKEN are needed",
            where=uri,
            fix="Export them.",
        )
    return Credentials(account, key, token)


_CREDENTIALS = {"s3": _s3_credentials, "gs": _google_credentials, "az": _azure_credentials}
