"""Data sets on storage: the names of files, their bytes, and how files are generated and verified."""
