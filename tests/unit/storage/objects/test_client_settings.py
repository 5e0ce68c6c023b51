import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError, Unavailable, UsageError
from penstock.storage import open_storage
from penstock.storage.objects.client_settings import (
    ObjectOptions,
    check_endpoint,
    expand_endpoints,
    resolve_settings,
)
from penstock.storage.uri import parse_uri

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "s3cr3t", "AWS_SESSION_TOKEN": "t0k3n"}
HERE = {**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9000/"}


def test_a_template_counts_and_several_multiply_in_order() -> None:
    assert expand_endpoints(("http://10.0.{0...1}.{8...9}:90{08...09}",)) == (
        "http://10.0.0.8:9008",
        "http://10.0.0.8:9009",
        "http://10.0.0.9:9008",
        "http://10.0.0.9:9009",
        "http://10.0.1.8:9008",
        "http://10.0.1.8:9009",
        "http://10.0.1.9:9008",
        "http://10.0.1.9:9009",
    )


@given(first=st.integers(0, 300), count=st.integers(1, 50))
def test_a_template_stands_for_as_many_endpoints_as_it_spans(first: int, count: int) -> None:
    urls = expand_endpoints((f"https://node{{{first}...{first + count - 1}}}",))
    assert urls == tuple(f"https://node{number}" for number in range(first, first + count))


def test_leading_zeros_give_the_width() -> None:
    assert expand_endpoints(("http://n{08...11}",)) == (
        "http://n08",
        "http://n09",
        "http://n10",
        "http://n11",
    )


def test_repeated_endpoints_count_once() -> None:
    assert expand_endpoints(("http://a", "http://{a...b}".replace("{a...b}", "a/"), "http://b")) == (
        "http://a",
        "http://b",
    )


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("http://n{9...1}", "down to"),
        ("http://n{1...99}.{1...99}", "9801 endpoints"),
        ("n1:9000", "not an endpoint"),
        ("ftp://n1", "not an endpoint"),
        ("http://", "not an endpoint"),
        ("http://n1/bucket", "not an endpoint"),
        ("http://n1?x=y", "not an endpoint"),
        ("http://n{1..3}", "not an endpoint"),
    ],
)
def test_invalid_endpoints_are_refused(template: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        expand_endpoints((template,))


def test_credentials_in_an_endpoint_are_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        check_endpoint("http://user:hunter2@host")
    assert "hunter2" not in str(caught.value)
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)


def test_no_secret_is_in_a_repr_or_in_the_record() -> None:
    (settings,) = resolve_settings(parse_uri("s3://bucket/a/b"), HERE)
    recorded = dict(open_storage("s3://bucket/a/b", HERE).options)
    shown = f"{settings!r} {json.dumps(recorded)}"
    assert not any(secret in shown for secret in KEYS.values())


def test_the_record_has_every_option_resolved() -> None:
    record = open_storage("s3://bucket/a/b?part_bytes=16MiB&attempts=2", {**HERE, "AWS_REGION": "r1"}).options
    assert record["part_bytes"] == 16 * 1024 * 1024
    assert record["attempts"] == 2
    assert record["endpoints"] == ("http://127.0.0.1:9000",)
    assert (record["region"], record["payload"], record["client"]) == ("r1", "unsigned", "obstore")


@pytest.mark.parametrize(
    ("environment", "endpoint", "region"),
    [
        ({"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"}, "http://b", "us-east-1"),
        ({"AWS_ENDPOINT_URL": "http://a", "AWS_DEFAULT_REGION": "eu-1"}, "http://a", "eu-1"),
        ({"AWS_REGION": "eu-2", "AWS_DEFAULT_REGION": "eu-1"}, "https://s3.eu-2.amazonaws.com", "eu-2"),
    ],
)
def test_endpoint_and_region_come_from_the_environment(
    environment: dict[str, str], endpoint: str, region: str
) -> None:
    (settings,) = resolve_settings(parse_uri("s3://bucket"), {**KEYS, **environment})
    assert (settings.endpoint, settings.options.region) == (endpoint, region)


def test_an_option_wins_over_the_environment() -> None:
    resolved = resolve_settings(
        parse_uri("s3://bucket?endpoints=http://o{1...2}&region=here"), {**HERE, "AWS_REGION": "there"}
    )
    assert [settings.endpoint for settings in resolved] == ["http://o1", "http://o2"]
    assert {settings.options.region for settings in resolved} == {"here"}


@pytest.mark.parametrize(
    ("uri", "environment", "named"),
    [
        ("s3://bucket", KEYS, "AWS_ENDPOINT_URL"),
        ("s3://bucket", {"AWS_ENDPOINT_URL": "http://a"}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket", {**HERE, "AWS_SECRET_ACCESS_KEY": ""}, "AWS_SECRET_ACCESS_KEY not set"),
        ("gs://bucket", {}, "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://container", {"AZURE_STORAGE_ACCOUNT_NAME": "account"}, "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_what_is_missing_is_named_at_once(uri: str, environment: dict[str, str], named: str) -> None:
    with pytest.raises(Unavailable, match=named):
        open_storage(uri, environment)


@pytest.mark.parametrize(
    "option",
    [
        {"part_bytes": "1MiB"},
        {"attempts": "0"},
        {"parts_in_flight": "0"},
        {"ranges_in_flight": "0"},
        {"range_bytes": "1"},
        {"request_timeout_s": "0s"},
        {"client": "boto3"},
        {"payload": "half"},
    ],
)
def test_options_out_of_bounds_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        open_storage("s3://bucket", HERE, options=option)


def test_a_negative_backoff_is_refused() -> None:
    with pytest.raises(UsageError, match="backoff_s"):
        ObjectOptions(backoff_s=-1.0)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_other_services_have_obstore_alone(scheme: str) -> None:
    with pytest.raises(UsageError, match="supports S3 only"):
        open_storage(f"{scheme}://bucket", {}, options={"client": "minio"})


@pytest.mark.parametrize("secret", ["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"])
def test_azure_opens_with_a_key_or_a_token(secret: str) -> None:
    value = "a2V5" if secret.endswith("KEY") else "sv=2024&sig=abc"
    storage = open_storage(
        "az://container/prefix",
        {"AZURE_STORAGE_ACCOUNT_NAME": "account", secret: value},
        options={"endpoints": "http://127.0.0.1:9", "attempts": "1", "request_timeout_s": "2s"},
    )
    with pytest.raises(PenstockError, match=r"127\.0\.0\.1:9"):
        storage.stat("key")
    assert (
        open_storage("az://container", {"AZURE_STORAGE_ACCOUNT_NAME": "a", secret: value}).uri
        == "az://container"
    )


def test_a_session_token_reaches_the_client() -> None:
    (settings,) = resolve_settings(parse_uri("s3://bucket"), HERE)
    assert (settings.access_key, settings.session_token) == ("AKIDEXAMPLE", "t0k3n")


@pytest.mark.parametrize(("content", "complaint"), [(None, "cannot be read"), ("", "no PEM certificate")])
def test_a_ca_bundle_that_is_none_is_refused(content: str | None, complaint: str, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    if content is not None:
        bundle.write_text(content)
    with pytest.raises(Unavailable, match=complaint) as caught:
        open_storage("s3://bucket", {**HERE, "AWS_CA_BUNDLE": str(bundle)})
    assert str(bundle) in str(caught.value)


@pytest.mark.parametrize(("scheme", "refused"), [("http", False), ("https", True)])
def test_s3torchconnector_refuses_a_ca_bundle_by_its_variable_where_it_would_matter(
    scheme: str, *, refused: bool, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("-----BEGIN CERTIFICATE-----")
    environment = {**HERE, "AWS_CA_BUNDLE": str(bundle)}
    options = {"client": "s3torchconnector", "endpoints": f"{scheme}://localhost:1"}
    if not refused:
        open_storage("s3://bucket", environment, options=options)
        return
    with pytest.raises(UsageError, match="AWS_CA_BUNDLE") as caught:
        open_storage("s3://bucket", environment, options=options)
    assert "Unset AWS_CA_BUNDLE" in caught.value.fix


@pytest.mark.parametrize("option", [{"payload": "signed"}, {"tls_verify": "false"}])
def test_what_s3torchconnector_cannot_do_is_refused(option: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="s3torchconnector"):
        open_storage("s3://bucket", HERE, options={"client": "s3torchconnector", **option})


@pytest.mark.parametrize(
    ("uri", "environment"),
    [
        ("gs://bucket", {"GOOGLE_APPLICATION_CREDENTIALS": "/no/such/account.json"}),
        ("az://box", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "!no-base64!"}),
    ],
)
def test_credentials_that_cannot_be_used_are_refused_without_being_shown(
    uri: str, environment: dict[str, str]
) -> None:
    with pytest.raises(Unavailable, match="cannot be used") as caught:
        open_storage(uri, environment)
    assert "!no-base64!" not in str(caught.value)


def test_google_has_no_endpoints_to_choose_from() -> None:
    with pytest.raises(UsageError, match="does not take the option endpoints"):
        open_storage("gs://bucket", {}, options={"endpoints": "http://127.0.0.1:9"})


def test_google_opens_with_a_service_account(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    account = {"type": "service_account", "private_key": pem, "private_key_id": "1", "client_email": "a@b"}
    path = tmp_path / "account.json"
    path.write_text(json.dumps({**account, "gcs_base_url": "https://127.0.0.1:9", "disable_oauth": True}))
    storage = open_storage(
        "gs://bucket", {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}, options={"attempts": "1"}
    )
    with pytest.raises(PenstockError, match="Cannot connect to gs://bucket"):
        storage.stat("key")
