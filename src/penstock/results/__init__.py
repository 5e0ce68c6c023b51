"""Results of runs: records for programs, pages for people, and the means to follow a run."""
