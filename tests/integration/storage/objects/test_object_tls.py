"""Encrypted endpoints: trusted by a bundle, refused without one, unverified only on request."""

import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.s3.fake_server import FakeServer, running_fake
from tests.support.s3.server import BUCKET

from penstock.errors import StorageError
from penstock.storage import Storage, open_storage
from penstock.storage.protocol import read_object, write_object
from penstock.testing.storage_contract import assert_same_bytes

Open = Callable[..., Storage]

every_tls_client = pytest.mark.parametrize("client", ["obstore", "minio"])


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority (`ca.pem`) and its certificate for 127.0.0.1 (`cert.pem`, `key.pem`)."""
    folder = tmp_path_factory.mktemp("tls")
    ca, ca_key, request = str(folder / "ca.pem"), str(folder / "ca.key"), str(folder / "request.pem")
    key, names = str(folder / "key.pem"), folder / "names"
    names.write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    new = ("-newkey", "rsa:2048", "-nodes")
    _openssl("req", "-x509", *new, "-days", "2", "-subj", "/CN=authority", "-out", ca, "-keyout", ca_key)
    _openssl("req", *new, "-subj", "/CN=server", "-out", request, "-keyout", key)
    signing = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", str(names))
    _openssl("x509", "-req", "-in", request, *signing, "-out", str(folder / "cert.pem"))
    return folder


@pytest.fixture(scope="module")
def server(pki: Path) -> Iterator[FakeServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki / "cert.pem", pki / "key.pem")
    with running_fake(tls=context) as running:
        yield running


@pytest.fixture
def open_tls(server: FakeServer) -> Open:
    def open_with(client: str, bundle: str = "", **options: str) -> Storage:
        limits = {"attempts": "1", "request_timeout_s": "10s", "part_bytes": "5MiB"}
        environment = {**server.as_server().environment, **({"AWS_CA_BUNDLE": bundle} if bundle else {})}
        return open_storage(f"s3://{BUCKET}", environment, options={"client": client, **limits, **options})

    return open_with


@every_tls_client
def test_a_bundle_makes_an_endpoint_trusted(client: str, open_tls: Open, pki: Path) -> None:
    storage = open_tls(client, str(pki / "ca.pem"))
    write_object(storage, "trusted", [bytes(11 * 1024 * 1024)])
    assert_same_bytes(read_object(storage, "trusted"), bytes(11 * 1024 * 1024))


@every_tls_client
def test_an_unknown_authority_is_refused(client: str, open_tls: Open) -> None:
    with pytest.raises(StorageError, match=r"Cannot connect .*(?i:certificate)") as caught:
        open_tls(client).stat("refused")
    assert "AWS_CA_BUNDLE" in caught.value.fix


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
@every_tls_client
def test_verification_can_be_switched_off_and_that_is_on_record(client: str, open_tls: Open) -> None:
    storage = open_tls(client, tls_verify="false")
    write_object(storage, "unseen", [b"content"])
    assert read_object(storage, "unseen") == b"content"
    assert storage.options["tls_verify"] is False


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_a_signed_payload_is_signed_over_tls_too(server: FakeServer, open_tls: Open) -> None:
    server.payload_modes.clear()
    write_object(open_tls("minio", tls_verify="false", payload="signed"), "signed", [b"content"])
    assert "UNSIGNED-PAYLOAD" not in server.payload_modes
    assert sum(server.payload_modes.values()) == 1
