"""The state of a training job as the engine sees it: leaves, tensors, regions."""
