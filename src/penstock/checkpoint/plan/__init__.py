"""Which rank writes and which rank reads which bytes: pure functions over numpy columns."""
