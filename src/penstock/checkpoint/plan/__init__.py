"""Plans which rank writes and reads which bytes: pure functions over numpy columns, and their agreement."""
