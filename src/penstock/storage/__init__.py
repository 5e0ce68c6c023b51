"""Storage behind one protocol: files, O_DIRECT files, objects and memory. Start at `open_storage`."""

from penstock.storage.protocol import Counters, ObjectInfo, Release, Sink, Source, Storage
from penstock.storage.uri import open_storage

__all__ = ["Counters", "ObjectInfo", "Release", "Sink", "Source", "Storage", "open_storage"]
