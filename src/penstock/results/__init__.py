"""Results of runs: records for programs, pages for people, and the live status of a run."""
