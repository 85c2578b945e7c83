"""What several folders of tests share, each helper once.

| module | owns |
|---|---|
| `rewards` | reward functions as users write them |
| `graphs` | the parts of one small GRPO graph on the model `tiny` |
| `plans` | plans of graphs for known machines, and plans written by hand, node by node |
| `simulations` | runs of a plan in the simulator |
| `simulated_rows` | plans simulated by the cost model, with rows that most tests have |
| `models` | tiny models and tokenizers |
| `architectures` | tiny models of each architecture, by name |
| `architecture_ranks` | what each of two ranks does with them |
| `differences` | how far our numbers of a model are from transformers' |
| `dense_flex` | FlexAttention as a dense reference with gradients |
| `kernels` | a Session, and chunks for kernels |
| `rows` | random rows and their reference numbers |
| `ragged_lists` | lists of lists as list columns |
| `episodes` | random rows of several turns, and samples of them |
| `episode_rows` | episodes written by hand, and an operator that makes some of rollouts |
| `training`, `train_ranks` | train kernels and their Assignments; what each of several ranks does |
| `train_worlds` | how many ranks train together, and which cases |
| `context_attention` | attention of ranks that divide tokens, and of one |
| `tiny_runs` | the tiny model's folder, and short quiet runs on it |
| `run_graphs`, `turn_graphs`, `device_graphs` | graphs for these runs, importable |
| `plain_loop` | training as a plain loop over a Hugging Face model |
| `host_plans` | plans of Workers that start fast |
| `told_worker` | a Worker that is told things between its events, and a channel with lost peers |
| `ray_clusters` | Ray clusters of simulated nodes on this machine |
| `strangers` | peers at a run's ports that do not belong to it |
| `killable_run` | a run in a process of its own |
| `scaled_runs` | runs whose replicas join and leave |
| `runs` | what a run left in its folder, and whether two runs were the same |
| `kept_runs` | run folders written by hand |
| `processes` | starting, following, finding and ending processes |
| `forked`, `fork_server` | commands and Workers as forks of a process that has imported |
| `forked_ranks` | the same for what multiprocessing spawns: an engine's ranks |
| `shown_path` | a script that prints what an interpreter has set for it |
| `parallel_tests` | tests on several processes |
| `turns` | tests that only repeat, of which `.ci/run` takes a third |
| `decode_tasks` | tasks of a decode loop |
| `scripted_turns` | rows that are written in turns by a script |
| `cost_records` | what each test costs |
| `nothing_left` | that nothing of a run is left |
| `comparison` | equality of messages that hold arrays; golden files |
| `files` | small data files |
| `environment_classes` | environments as users write them |
| `environment_pools` | pools of environments, opened and asked |
"""
