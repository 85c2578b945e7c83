"""The process of a Worker: what runs at the other end of the Supervisor's control socket.

Enters: messages, in the order of task_inbox.py. Leaves: events, metrics, spans, a heartbeat.
Waits: its main thread for the next task, a second one for messages. Begin with worker_process.py.
"""
