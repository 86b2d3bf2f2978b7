"""Measuring ways of generating text against each other, and against other programs.

`contestants` are the rows of the table, `worker` runs one of them in a process of its own, `race` lets them take
turns, `report` turns what they did into numbers and a table. `peers` builds the same model in other programs.
"""
