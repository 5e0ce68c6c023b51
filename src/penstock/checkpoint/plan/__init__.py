"""Who saves and who loads which bytes: pure functions from columns to columns."""
