"""Write submissions: an organisation's tree, result directories of runs, descriptions of systems.

Invariant: result directories in the tree are complete; drafts and runs that were set aside are below
`.mlps/`, which checkers skip.
"""
