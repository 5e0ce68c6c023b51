"""Turns a save into a checkpoint: a draft that no reader sees, made durable, then visible in one step."""
