"""Loaders: read the samples of a batch from storage to one rank, ahead of the step that needs them."""
