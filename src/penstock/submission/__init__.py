"""Check the results of a submission by the rules of an edition, from files alone, and write submissions."""
