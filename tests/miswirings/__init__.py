"""What a type checker must see in the editor: the same graph wired rightly and wrongly. Read by
pyright, never run.
"""
