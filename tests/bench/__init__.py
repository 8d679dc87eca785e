"""Benchmarks: paired against a baseline, interleaved, medians and ratios. Run with `make bench`."""
