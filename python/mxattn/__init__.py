"""Attention in 8 and 4 bits, forward and backward, for training."""
