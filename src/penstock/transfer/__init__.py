"""Moving bytes between memory and storage: buffers, pipelines and what they measured."""
