"""What ``benchmarks.layer`` compares: one module for each layer, and what they share.

In this process: `limit`, `ours`, `gshard`. In one of their own: `hugging_face`, `maxtext`; they are started with
another Python, so these two and `protocol` import nothing but numpy and the peer.
"""
