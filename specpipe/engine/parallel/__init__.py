"""Tensor parallelism: one model, its weights split among the ranks of a target worker.

`table` says what is split and how (pure), `shard` loads one rank's part, `collective` joins what the parts compute,
`channel` and `announce` are the control socket and what travels on it, `rank` is every rank but the first, `group` is
rank 0's handle on the others. These are children of rank 0's process on its host (`children`, `shared_memory`), or
processes of other hosts that dial it (`distant`, `distant_rank`, `rendezvous`, and `joining`, which says who may).
"""
