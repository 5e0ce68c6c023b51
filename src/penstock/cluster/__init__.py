"""Many processes as one: communicators, launching, and stopping together when one fails."""
