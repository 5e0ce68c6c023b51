"""Objects of S3, Google and Azure as a storage. `open_objects` is the way in; `client` is the waist below."""

from __future__ import annotations

from penstock.environment import Environment
from penstock.storage.objects.client_settings import ObjectOptions, resolve_location
from penstock.storage.objects.object_storage import ObjectStorage
from penstock.storage.uri import Location

__all__ = ["ObjectOptions", "ObjectStorage", "open_objects"]


def open_objects(location: Location, environment: Environment, rank: int) -> ObjectStorage:
    """Open the bucket and prefix that `location` names. Nothing is asked of the service yet.

    `Unavailable` without an endpoint, credentials or the client's library; `rank` decides whose turn it is
    among several endpoints.
    """
    return ObjectStorage(resolve_location(location, environment), rank)
