"""What a host counts while a run lasts: processors, memory, drives, networks; and whose bytes they saw."""
