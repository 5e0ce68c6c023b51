"""The engine behind the interfaces of other frameworks: one module for each, which imports it."""
