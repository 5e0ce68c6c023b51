"""How files are written, read, found and named: the parts of `penstock.storage.files.file_storage`."""
