"""From format to format in bounded memory: opened checkpoint -> slabs of elements -> files of the new one."""
