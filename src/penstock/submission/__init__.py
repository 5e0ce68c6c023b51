"""Is a result valid: rules as data, judged from files alone."""
