"""The engine behind the interfaces of other frameworks; each module imports the framework that it serves."""
