"""All exercises of the course: in which notebook each is, how difficult, and how many minutes it takes.

The notebooks print the same numbers above each exercise (a test compares the two). They stand here as well because
`kv.check.progress` needs them where the package is installed without the notebooks' sources.
"""

from typing import NamedTuple


class Effort(NamedTuple):
    """What an exercise asks for. `difficulty` is 1 to 3."""

    difficulty: int
    minutes: int


# notebook -> exercise -> effort, each in the order of the course
CATALOG = {
    "00_start_here": {
        "latencies": Effort(1, 3),
        "word_times": Effort(2, 5),
        "first_wait": Effort(2, 5),
        "hold_back": Effort(3, 8),
    },
    "01_naive_generation": {
        "causal_attention": Effort(1, 7),
        "greedy_until": Effort(2, 6),
        "rows_computed": Effort(1, 4),
        "linear_flops": Effort(2, 6),
        "fit_exponent": Effort(1, 4),
    },
    "02_kv_cache": {
        "append": Effort(1, 6),
        "bytes_copied": Effort(2, 5),
        "cached_generate": Effort(3, 10),
        "next_positions": Effort(2, 7),
        "chunk_mask": Effort(2, 6),
    },
    "03_prefill_and_decode": {
        "least_time": Effort(1, 4),
        "intensity": Effort(1, 4),
        "crossover_context": Effort(2, 6),
        "prefill_in_chunks": Effort(2, 8),
        "accept": Effort(2, 6),
        "output_price_ratio": Effort(2, 5),
    },
    "04_memory_and_gqa": {
        "cache_size": Effort(1, 4),
        "tokens_that_fit": Effort(2, 6),
        "repeat_heads": Effort(1, 4),
        "attend_grouped": Effort(2, 10),
        "pool_heads": Effort(2, 6),
    },
    "05_sliding_window": {
        "window_mask": Effort(1, 4),
        "ring_slots": Effort(2, 6),
        "first_in_reach": Effort(2, 5),
        "sink_distance": Effort(3, 8),
        "windowed_bytes": Effort(2, 6),
    },
    "06_paged_attention": {
        "blocks_for": Effort(1, 3),
        "slot_mapping": Effort(2, 6),
        "give_back": Effort(2, 6),
        "copy_on_write": Effort(2, 6),
        "share_budget": Effort(3, 8),
    },
    "07_prefix_caching": {
        "block_keys": Effort(2, 8),
        "found_tokens": Effort(2, 6),
        "next_to_go": Effort(2, 6),
        "request_price": Effort(1, 4),
        "tokens_computed": Effort(2, 6),
    },
    "08_weight_quantization": {
        "round_to_grid": Effort(1, 5),
        "zero_point": Effort(2, 7),
        "pack_nibbles": Effort(1, 5),
        "quantized_bytes": Effort(1, 5),
        "read_q4_0": Effort(2, 6),
        "gptq_update": Effort(2, 8),
        "fold_value_scale": Effort(3, 8),
    },
    "09_cache_quantization": {
        "round_keys": Effort(2, 12),
        "full_groups": Effort(2, 8),
        "exact_tokens": Effort(2, 6),
        "true_bits": Effort(1, 3),
        "rounded_cache_bytes": Effort(2, 8),
        "fold_into_query": Effort(3, 8),
    },
    "10_from_course_to_production": {
        "fastest_decode": Effort(1, 4),
        "joined_product": Effort(1, 5),
        "int8_product": Effort(2, 7),
        "gap_percentile": Effort(2, 6),
        "ring_bytes": Effort(2, 6),
    },
}


def exercises(notebook: str = "") -> dict[str, dict[str, Effort]]:
    """The part of `CATALOG` that belongs to one notebook, given by number or name (`exercises("02")`), or all of it.

    Raises `ValueError` when there is no such notebook.
    """
    chosen = {name: part for name, part in CATALOG.items() if notebook in ("", name[:2], name)}
    if not chosen:
        raise ValueError(f'notebook={notebook!r} must be a number such as "02", or one of: {", ".join(CATALOG)}.')
    return chosen
