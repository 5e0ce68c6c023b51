"""The study of levels: the same checkpoints by several configurations, each traced, set side by side.

    request -> rows (one configuration each) -> training and saves, traced -> runs.yaml -> comparison

Invariant: what a table says of a row comes from its trace; nothing is measured by a second clock.
"""
