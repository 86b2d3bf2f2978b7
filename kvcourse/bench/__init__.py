"""Measuring ways of generating text against each other, and against other programs.

One text at a time: `rows` are those of the table: `contestants` and `paged_row` of the course, `transformers_rows`,
`llama_cpp_row` and `vllm_row` of others. `process` runs `worker`, which holds one of them, `race` lets them take turns,
`report` turns what they did into numbers and a table; `bytes_read` says what a step must read. `peers` builds the same
model in transformers.

`serving` measures the engine that serves many requests: `batches` beside a static batch and vLLM (whose other half is
`vllm_worker`), `steps` takes a decode step apart, `load` replays a trace, `serving_report` is the text.
"""
