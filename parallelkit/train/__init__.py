"""The demonstration: a small GPT trained on real text by several ranks, and held against one."""
