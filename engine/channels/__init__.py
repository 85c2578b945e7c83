"""How rows and tensors get from one Worker to another: two contracts (contract.py).

    pull         inproc.py, shm/ (one host), zmq/ (between hosts), routed.py (both)
    scheduled    tensors/

header.py is what every transport says of a block; layout.py and frames.py take record batches apart
and put them together; multipart.py carries a block as frames; peers.py asks.
"""
