"""Questions to events: each module one question, asked in SQL, answered as a table that renders anywhere."""
