"""A rank's share of a save on its way from tensors through bounded memory to storage; start at `base`."""
