"""Questions to events, one function each: asked in SQL, answered as a table that renders anywhere."""
