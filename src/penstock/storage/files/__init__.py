"""How files are written, read, found and named: the parts of `penstock.storage.posix`."""
