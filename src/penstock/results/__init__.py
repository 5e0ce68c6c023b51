"""What is left after a run: records that programs read, and pages that people read."""
