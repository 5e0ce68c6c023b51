"""Settings for object storage: options, endpoints and credentials, from a URI and the environment.

Parsed once when a `Storage` is opened; adapters receive `ClientSettings` and read nothing else. Invariant:
neither the `repr` nor the recorded options ever show a secret.
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from penstock.environment import Environment, export_variables, withdraw_variable
from penstock.errors import Unavailable, UsageError
from penstock.storage.uri import Location, parse_options

ClientName = Literal["obstore", "minio", "s3dlio", "s3torchconnector"]
Payload = Literal["unsigned", "signed"]

_RANGE = re.compile(r"\{(\d+)\.\.\.(\d+)\}")
_MAX_ENDPOINTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectOptions:
    """Options for reading and writing objects. All options are recorded with every result."""

    client: ClientName = "obstore"
    """The client library; `gs://` and `az://` support only `obstore`."""
    part_bytes: int = 8 * 1024 * 1024
    """Objects larger than this are uploaded in parts of this size. Parts are larger if an object would have
    more than 10,000 of them, and of a similar size if the submitted buffers can then be sent without copying.
    """
    parts_in_flight: int = 8
    """The number of parts of one object in flight at once, and hence of buffers that a sink holds."""
    range_bytes: int = 8 * 1024 * 1024
    """Reads larger than this are split into ranges of this size."""
    ranges_in_flight: int = 8
    """The number of ranges of large reads in flight at once, over all readers of one `Storage`."""
    endpoints: tuple[str, ...] = ()
    """URLs or templates such as `http://10.0.0.{1...8}:9000`; if empty, the environment's endpoint."""
    region: str = ""
    path_style: bool = True
    """True puts the bucket into the path of the URL, False into its host name."""
    tls_verify: bool = True
    payload: Payload = "unsigned"
    """Whether the signature covers the bytes of an object. Over https, TLS already protects them; over plain
    http, a benchmark would measure SHA-256, which is 7 times slower than the network. The default is
    therefore `unsigned`. Use `signed` for http on an untrusted network.
    """
    attempts: int = 5
    """The number of times a request is sent before its failure is final."""
    backoff_s: float = 0.1
    """The wait before the second attempt; it doubles with each attempt, with jitter, up to 20 s."""
    request_timeout_s: float = 60.0
    """The time limit for one request, including its body."""

    def __post_init__(self) -> None:
        least = {"attempts": 1, "parts_in_flight": 1, "ranges_in_flight": 1, "range_bytes": 4096}
        for name, minimum in {**least, "part_bytes": MIN_PART_BYTES}.items():
            if getattr(self, name) < minimum:
                raise UsageError(
                    f"{name} is {getattr(self, name)}, below its minimum, {minimum}",
                    fix="S3 refuses parts under 5 MiB." if name == "part_bytes" else f"Raise {name}.",
                )
        if self.backoff_s < 0 or self.request_timeout_s <= 0:
            raise UsageError(
                "backoff_s is negative, or request_timeout_s is not above zero",
                fix="Give both in seconds, for example backoff_s=0.1 and request_timeout_s=60.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Everything that an adapter needs for one endpoint. No secret is part of the `repr`."""

    scheme: str
    endpoint: str
    """The service's URL without the bucket; empty if the client knows it (`gs://`, `az://`)."""
    bucket: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str = field(repr=False)
    options: ObjectOptions
    ca_bundle: str = ""
    """The path of a PEM file with additional trusted authorities; if empty, the system's."""

    @property
    def uses_tls(self) -> bool:
        """True if requests are encrypted."""
        return not self.endpoint.startswith("http://")


_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")


def resolve_settings(location: Location, environment: Environment) -> tuple[ClientSettings, ...]:
    """Return the settings for each endpoint; the environment provides what `location` leaves open."""
    options = parse_options(ObjectOptions, location.options, where=location.uri)
    bucket = location.root.partition("/")[0]
    if location.scheme == "s3" and not _BUCKET.fullmatch(bucket):
        raise UsageError(
            f"No bucket can be called {bucket!r}",
            where=location.uri,
            fix="Bucket names have 3 to 63 letters, digits, dots and hyphens.",
        )
    if location.scheme != "s3" and options.client != "obstore":
        raise UsageError(
            f"The client {options.client} supports S3 only",
            where=location.uri,
            fix=f"For {location.scheme}:// use client=obstore.",
        )
    region = options.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION", "")
    urls = _endpoints(options.endpoints, region, location, environment)
    resolved = replace(options, endpoints=tuple(filter(None, urls)), region=region or "us-east-1")
    access_key, secret_key, session_token = _CREDENTIALS[location.scheme](location.uri, environment)
    ca_bundle = _ca_bundle(environment)
    return tuple(
        ClientSettings(
            scheme=location.scheme,
            endpoint=url,
            bucket=bucket,
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            options=resolved,
            ca_bundle=ca_bundle,
        )
        for url in urls
    )


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
        raise Unavailable("AWS_CA_BUNDLE contains no PEM certificate", where=path, fix="Correct or unset it.")
    return path


def _endpoints(
    templates: tuple[str, ...], region: str, location: Location, environment: Environment
) -> tuple[str, ...]:
    if templates and location.scheme == "gs":
        raise UsageError(
            "gs:// does not take the option endpoints",
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
    """Return the URLs to which `templates` expand, each once: all combinations of ranges like `{1...8}`."""
    urls: dict[str, None] = {}
    for template in templates:
        pieces = _RANGE.split(template.strip())
        spans = [_span(template, first, last) for first, last in zip(pieces[1::3], pieces[2::3], strict=True)]
        total = math.prod(map(len, spans))
        if total > _MAX_ENDPOINTS:
            raise UsageError(
                f"{template!r} expands to {total} endpoints", fix=f"Use at most {_MAX_ENDPOINTS}."
            )
        for numbers in itertools.product(*spans):
            parts = (number + literal for number, literal in zip(numbers, pieces[3::3], strict=True))
            urls[check_endpoint(pieces[0] + "".join(parts))] = None
    return tuple(urls)


def _span(template: str, first: str, last: str) -> list[str]:
    if int(first) > int(last):
        raise UsageError(
            f"{template!r} counts from {first} down to {last}", fix="Put the smaller number first."
        )
    width = len(first) if first.startswith("0") else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]


def check_endpoint(url: str) -> str:
    """Return `url` without a trailing slash; raise unless it is `http(s)://host[:port]`."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            "An endpoint contains a user name or password",
            fix="Give credentials as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        )
    wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/")
    if wrong or parts.query or parts.fragment or "{" in url:
        raise UsageError(
            f"{url!r} is not an endpoint",
            fix="Write http://host:port or https://host; ranges in templates look like {1...8}.",
        )
    return url.rstrip("/")


def _s3_credentials(uri: str, environment: Environment) -> tuple[str, str, str]:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise Unavailable(
            f"No S3 credentials: {' and '.join(missing)} not set",
            where=uri,
            fix="Export them; profiles and instance roles are not consulted, because that may take seconds.",
        )
    key, secret = (environment[name] for name in names)
    return key, secret, environment.get("AWS_SESSION_TOKEN", "")


def _google_credentials(uri: str, environment: Environment) -> tuple[str, str, str]:
    path = environment.get("GOOGLE_APPLICATION_CREDENTIALS") or environment.get("GOOGLE_SERVICE_ACCOUNT")
    if not path:
        raise Unavailable(
            "No Google credentials: GOOGLE_APPLICATION_CREDENTIALS is not set",
            where=uri,
            fix="Set it to the path of a service account's JSON key.",
        )
    return path, "", ""


def _azure_credentials(uri: str, environment: Environment) -> tuple[str, str, str]:
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
    return account, key, token


_CREDENTIALS = {"s3": _s3_credentials, "gs": _google_credentials, "az": _azure_credentials}


MIN_PART_BYTES: Final = 5 * 1024 * 1024


def export_credentials(settings: ClientSettings) -> Mapping[str, str]:
    """Export credentials and region for libraries that read only the environment; disable metadata lookups.

    Without AWS_EC2_METADATA_DISABLED, such a library would wait for the metadata service of a cloud in which
    it does not run.
    """
    exported = {
        "AWS_ACCESS_KEY_ID": settings.access_key,
        "AWS_SECRET_ACCESS_KEY": settings.secret_key,
        "AWS_REGION": settings.options.region,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    if settings.session_token:
        exported["AWS_SESSION_TOKEN"] = settings.session_token
    else:
        withdraw_variable("AWS_SESSION_TOKEN")
    export_variables(exported)
    return exported
