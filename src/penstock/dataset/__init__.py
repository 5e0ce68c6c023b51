"""Data sets on storage: names of files, the bytes in them, and how both are made and verified."""
