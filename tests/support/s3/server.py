"""S3 servers for tests: where one listens and how to sign for it.

`fake_server` runs in this process, `moto_server` and `radosgw_server` in others. All take the same
credentials, because some clients read them from the process environment only once.
Each is a context manager; `fixtures` has them for pytest.
"""

from dataclasses import dataclass

from penstock.environment import Environment

ACCESS_KEY = "penstocktests"
SECRET_KEY = "penstock-tests-secret"
BUCKET = "penstock-tests"
REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class S3Server:
    """One running server: its `kind` and its URL; it already has the bucket `BUCKET`."""

    kind: str
    endpoint: str

    @property
    def environment(self) -> Environment:
        """The variables with which `open_storage` reaches this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
        }
