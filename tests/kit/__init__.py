"""What several folders of tests share, each helper once.

| module | owns |
|---|---|
| `rewards` | reward functions as users write them |
| `graphs` | the parts of one small GRPO graph on the model `tiny` |
| `plans` | plans of graphs for known machines, and plans written by hand, node by node |
| `simulations` | runs of a plan in the simulator |
| `models` | tiny models and tokenizers |
| `kernels` | a Session, and chunks for kernels |
| `rows` | random rows and their reference numbers |
| `training`, `train_ranks` | train kernels and their Assignments; what each of several ranks does |
| `runs` | what a run left in its folder, and whether two runs were the same to the bit |
| `processes` | which processes this one has started |
| `nothing_left` | the fixture that refuses processes left by a run |
| `comparison` | equality of messages that hold arrays; golden files |
| `files` | small data files |
"""
