"""Reading trace files of any dialect: bytes -> chunks of lines -> batches of events and an account."""
