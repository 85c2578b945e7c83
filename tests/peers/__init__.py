"""What peers' own code returns: scripts that record it, each run in its peer's environment.

    make peers

makes an environment for each peer under .peers/ from its lock, runs `record_<peer>.py` there and
writes `vectors/<peer>.json`: inputs, outputs, the peer's release and the functions that were
called; `record_names.py` writes the names of its configuration into `names/`;
`record_trl_adapter.py` writes the adapters that TRL trains into `adapters/`.
`tests/unit/test_peers.py` compares our operators and losses with the vectors, and
`tests/unit/test_peer_names.py` our tables with the names, `tests/unit/test_adapter_peers.py` our
adapters with theirs, without a network or a peer. The scripts import nothing of ours but
`inputs.py` and `adapter_steps.py`, which need the standard library alone, and `tensors.py`, which
needs torch.
"""
