"""Small faults, each written into a copy of the tree, and which tests catch them (scripts/mutants).

Owns: the list of faults (faults/*.toml), which tests reach each (reached.json), which were caught
(caught.json). Does not own: the tests. It guards them: whoever moves, merges or removes tests shows
that the same faults are caught before and after.

| module | owns |
|---|---|
| `code_faults` | the list, and writing one into the text of its file |
| `line_probes` | text that says which test reaches a fault's line |
| `tree_copies` | copies of the tree, and the environment of pytest in one |
| `pytest_records` | a plugin: what each test came to, and the end after so many seconds |
| `reach` | recording, and the choice of tests for each fault |
| `trials` | running one fault's tests, and ending all that hangs |
| `verdicts` | what became of each fault, and what was caught before |
"""
