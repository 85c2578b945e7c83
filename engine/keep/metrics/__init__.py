"""The numbers of each Step: put together, written, and read back.

Enters: what Workers report of a Step (step_accounts.py), and when versions were offered and loaded
(weight_times.py). Leaves: metrics.jsonl and its views (sinks.py), and its rows again
(metric_lines.py). Waits: nobody.
"""
