"""Loaders: how the samples of a batch come from storage to one rank, ahead of the step that needs them."""
