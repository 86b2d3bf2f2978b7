"""Measuring ways of generating text against each other, and against other programs.

`contestants` are the rows of the table, `worker` runs one of them in a process of its own, `race` lets them take
turns, `report` turns what they did into numbers and a table. `peers` builds the same model in other programs.

`serving` measures the engine that serves many requests: `batches` beside a static batch and vLLM (`vllm_row`, whose
other half is `vllm_worker`), `steps` takes a decode step apart, `load` replays a trace, `serving_report` is the text.
"""
