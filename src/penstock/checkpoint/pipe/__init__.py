"""The pipe: bytes from a producer through owned buffers to storage, and back to a verifier (`base`)."""
