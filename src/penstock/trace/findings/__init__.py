"""What stands out in a study, as rules: each looks for one thing and shows the rows that it saw.

study -> rules (this folder, one module a subject) -> findings with evidence
"""
