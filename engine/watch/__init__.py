"""Looking at runs, live and afterwards: the page, top, the report, Prometheus; its own process.

Enters: run folders, read by engine/keep/reader. Leaves: HTML, JSON, events, text. Waits: a stream
for what is new in a folder. It writes nothing, and the run knows nothing of it (decision 0033).
"""
