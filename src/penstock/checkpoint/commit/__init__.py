"""How a save becomes a checkpoint: a draft that nobody sees, made durable, then visible in one step."""
