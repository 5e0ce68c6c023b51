"""Questions about events, one function each: SQL queries whose answers are tables."""
