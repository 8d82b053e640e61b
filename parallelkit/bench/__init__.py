"""Benchmarks that check their results, interleave what they compare and end with one JSON line."""
