"""The engine behind torch's own `dcp.save` and `dcp.load`: storage writer, storage reader and planners."""
