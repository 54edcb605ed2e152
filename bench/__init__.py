"""Benchmarks: one file a question, one rig; what was measured is in bench/results/."""
