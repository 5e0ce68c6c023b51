"""Turns a save into a checkpoint: a draft that no reader sees is made durable, then atomically visible."""
