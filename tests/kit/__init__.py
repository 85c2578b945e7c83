"""What several folders of tests share, each helper once.

| module | owns |
|---|---|
| `rewards` | reward functions and operators that users could have written |
| `graphs` | the parts of one small GRPO graph on the model `tiny` |
| `plans` | plans of graphs for known machines, and plans written by hand, node by node |
| `runs` | what a run left in its folder, and whether two runs were the same to the bit |
| `processes` | which processes this one has started |
| `nothing_left` | the fixture that refuses processes left by a run |
| `comparison` | equality of what `==` does not compare: arrays within messages, texts within golden files |
| `files` | small data files |
"""
