"""Many processes as one job: communicators, launching, and stopping together when one process fails."""
