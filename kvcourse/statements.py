"""The plain statements about fast inference that the course tests, by number. Verdicts are measured, not given here.

They are put as plainly as one reads them everywhere; some mislead as said, and the notebooks show where.
"""

STATEMENTS = {
    1: "the first token takes long, the next ones follow at the speed of a fast reader",
    2: "without the cache, generating would cost about a hundred times more",
    3: "without the cache, K and V of the whole sequence are computed again at each token; "
    "doubling the tokens quadruples the work",
    4: "the cached K and V do not change",
    5: "with the cache the work of a step is O(1)",
    6: "after a few tokens the gap in operations is large",
    7: "prefill is parallel and compute-bound, and sets TTFT",
    8: "decode is sequential and memory-bound, and sets the gaps between tokens",
    9: "both grow linearly with length",
    10: "on a long prompt prefill takes seconds; on a long answer decode dominates",
    11: "input tokens are sold 4 to 5 times cheaper than output tokens, and not arbitrarily",
    12: "prefix caching makes agents and chats affordable",
    13: "cache memory = 2 x layers x heads x d_head x length x batch x 2 bytes",
    14: "70B parameters, 128,000 tokens, batch 1: several tens of GB of cache",
    15: "the cache, more than reasoning ability, limits usable context",
    16: "INT8 or INT4 caches divide memory by 2 or 4",
    17: "MQA and GQA share K and V between heads",
    18: "a sliding window keeps only the recent cache",
    19: "paged attention treats the cache as pages of virtual memory",
    20: "fewer bits for each weight: FP32 4 bytes, FP16 2, INT8 1, INT4 1/2",
    21: "a 70B model takes 280, 140, 70, 35 or 17.5 GB at 32, 16, 8, 4 or 2 bits",
    22: "rounding turns 0.237 into the nearest of 16 grid values",
    23: "the loss of quality is small at INT8, modest at INT4, large below",
    24: "GPTQ, AWQ and GGUF do not treat all weights alike",
    25: "cache quantization is the same idea on stored activations",
    26: "Llama 70B runs on a 64 GB laptop in 4 bits, where FP16 needs a cluster",
    27: "QLoRA's 4 bits are another grid for the same weights",
    28: "a window of a million tokens is a memory problem, not an attention-compute problem",
    29: "without the cache, production would not be viable",
}
