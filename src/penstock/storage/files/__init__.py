"""Files as a storage: start reading at `penstock.storage.files.file_storage`."""
