"""torch's own interfaces of distributed checkpoints, carried out by the engine: `dcp.save` and `dcp.load`."""
