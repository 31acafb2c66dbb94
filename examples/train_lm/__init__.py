"""Trains a small Mixture-of-Experts language model on real text under a capacity policy.

``python -m examples.train_lm --help`` tells the options.
"""
