"""What is said in a run: events, instructions, rows by reference, reports; no one's decisions.

Enters: a plan, of which it speaks. Leaves: data types that the coordinator, the loop, Workers and
what is kept of a run all speak. Waits: nobody; a message says in its docstring who answers it, and
with what. Does not own: bytes on a wire (engine/run/control), rows themselves (engine/channels).
"""
