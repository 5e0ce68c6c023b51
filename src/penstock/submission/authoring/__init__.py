"""Write submissions: an organization's tree, the result directories of runs, descriptions of systems.

Invariant: every result directory in the tree is complete; drafts and runs that were set aside are below
`.mlps/`, which checkers skip.
"""
