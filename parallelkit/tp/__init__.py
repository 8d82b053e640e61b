"""Whole models split over the ranks of a group, and back.

model     `tensor_parallel`: replaces modules by those of parallelkit.nn
plans     which module is split how
regions   where activations are sharded, and which random numbers differ by rank
state     weights and gradients of the unsplit model
"""
