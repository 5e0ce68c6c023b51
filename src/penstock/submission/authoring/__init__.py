"""Making submissions: a claimed tree, leaves of runs, the code image, the system's description.

Invariant: what lies in the tree under its name is whole; what is under way, or was set aside, lies below
`.mlps/`, where judges do not look.
"""
