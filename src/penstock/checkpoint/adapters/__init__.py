"""The engine behind other people's interfaces: one module a framework, imported by who has that framework."""
