"""What the process of a run, its hosts and its Workers' processes say to each other, as bytes.

Enters: instructions, questions, open files. Leaves: frames on a control socket, without pickle
(wire.py). Waits: nobody; who answers what stands at each message.
"""
