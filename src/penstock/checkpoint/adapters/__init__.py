"""The engine behind the interfaces of other frameworks: one module for each framework, which imports it."""
