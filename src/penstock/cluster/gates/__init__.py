"""Gates before a run: what must hold of machines, ranks and storage, so that its result means something."""
