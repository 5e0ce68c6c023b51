"""Reading trace files of any dialect: from bytes to chunks of lines to batches of events and an account."""
