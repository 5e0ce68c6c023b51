"""Write submissions: an organisation's tree, result directories of runs, descriptions of systems.

Invariant: what has its name in the tree is complete; drafts and what was set aside are below `.mlps/`, where
checkers do not look.
"""
