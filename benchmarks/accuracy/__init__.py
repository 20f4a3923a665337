"""Accuracy of sparse decoding on real weights; ``python -m benchmarks.accuracy --help`` tells how to run it."""
