"""What lies on disk before training: names of files, bytes in them, and how both are made."""
