"""A timeline of a run that Perfetto opens.

Enters: spans of Workers. Leaves: trace/*.json, with arrows from where rows were made to where they
were taken. Waits: nobody.
"""
