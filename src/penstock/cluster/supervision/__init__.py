"""The processes beside and above the ranks of a job, so that a job ends whole."""
