"""Read rotary base and scaling from the config.json of a Hugging Face checkpoint, in each of its spellings.

Source: `modeling_rope_utils.py` of `transformers` 5.24.
"""

import math

from kvcourse.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from kvcourse.weights.fields import Fields, short


def read_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies.

    `transformers` 5 writes one object `rope_parameters`; before, there were a number `rope_theta` and an object
    `rope_scaling`. A file may have both only if they agree.
    """
    thetas, scalings = {"rope_theta": fields.number("rope_theta", None)}, {}
    for name in ("rope_parameters", "rope_scaling"):
        given = fields.get(name)
        if given is None or given == {}:
            continue
        if not isinstance(given, dict):
            raise fields.refused(name, "which must be an object.")
        inner = Fields(given, fields.where, f"{name}.")
        thetas[f"{name}.rope_theta"] = inner.number("rope_theta", None)
        scalings[name] = read_scaling(inner, fields)
    thetas = {name: theta for name, theta in thetas.items() if theta is not None}
    for found in (thetas, scalings):
        if len(set(found.values())) > 1:
            both = ", but ".join(f"{name} = {value}" for name, value in found.items())
            raise fields.error(f"contradicts itself: {both}.")
    # 10,000 is the default of all four classes; Llama 2 and older models leave it out.
    return next(iter(thetas.values()), 10_000.0), next(iter(scalings.values()), None)


def read_scaling(fields: Fields, outer: Fields) -> RopeScaling | None:
    """Scaling from a `rope_scaling` or `rope_parameters` object, whose kind is under "rope_type" or, older, "type"."""
    kind, older = (fields.one_of(name, SCALINGS) for name in ("rope_type", "type"))
    if kind and older and kind != older:
        raise fields.refused("rope_type", f"which contradicts type = {short(older)}.")
    kind = kind or older
    if kind is None and set(fields.fields) - {"rope_theta", "partial_rotary_factor"}:
        raise fields.error(f"has no field {fields.prefix}rope_type, but fields {', '.join(fields.fields)} beside it.")
    read = SCALINGS[kind or "default"]
    scaling = read(fields, trained_length(fields, outer), outer.whole("max_position_embeddings"))
    if fields.number("partial_rotary_factor", 1.0) != 1:
        raise fields.refused("partial_rotary_factor", "which is not supported: only 1 is.")
    fields.finish({"finetuned"}, {})  # a mark that the first YaRN models carry
    return scaling


def trained_length(fields: Fields, outer: Fields) -> int | None:
    """Length of the texts that the model was trained on before its positions were stretched: given in the object or
    beside it, or not at all."""
    name = "original_max_position_embeddings"
    inside, outside = fields.whole(name, None), outer.whole(name, None)
    if inside and outside and inside != outside:
        raise fields.refused(name, f"which contradicts {name} = {outside} outside.")
    return inside or outside


def no_scaling(fields: Fields, trained: int | None, max_seq_len: int) -> None:
    return None


def linear(fields: Fields, trained: int | None, max_seq_len: int) -> LinearScaling:
    return fields.make(LinearScaling, factor=fields.number("factor"))


def llama3(fields: Fields, trained: int | None, max_seq_len: int) -> Llama3Scaling:
    numbers = {name: fields.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    trained = trained or fields.whole("original_max_position_embeddings")
    return fields.make(Llama3Scaling, **numbers, original_max_seq_len=trained)


def yarn(fields: Fields, trained: int | None, max_seq_len: int) -> YarnScaling:
    """YaRN as `_compute_yarn_parameters` of `transformers` has it, where a 0 counts as not given."""
    if "factor" in fields.fields and fields.get("factor") is None and trained is not None:
        factor = max_seq_len / trained  # what null means there; an absent factor is an error, there too
    else:
        factor = fields.number("factor")
    attention_factor = fields.number("attention_factor", None)
    mscale, mscale_all = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    if attention_factor is None and mscale and mscale_all and factor > 1:
        attention_factor = (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all * math.log(factor) + 1)
    return fields.make(
        YarnScaling,
        factor=factor,
        original_max_seq_len=trained or max_seq_len,
        attention_factor=attention_factor,
        beta_fast=fields.number("beta_fast", 0.0) or 32.0,
        beta_slow=fields.number("beta_slow", 0.0) or 1.0,
        truncate=fields.flag("truncate", True),
    )


SCALINGS = {"default": no_scaling, "linear": linear, "llama3": llama3, "yarn": yarn}
