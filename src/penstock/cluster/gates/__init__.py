"""Gates before a run: the conditions on machines, ranks and storage without which its result means little."""
