"""Generated submissions for tests: valid trees, and one way to break each rule."""
