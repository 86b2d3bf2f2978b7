"""A quantized model as a folder: packed weights as they stand in memory, so that what is read back is the same bit for
bit.

| file | what it holds |
|---|---|
| `quantized.safetensors` | all tensors: codes, scales and zeros of each rounded weight, and what was not rounded |
| `quantized.json` | the model's shape, the grid of each rounded weight, the report, and a SHA-256 of all of it |

It has no tokenizer: that is the one of the model it was made from.
"""

import json
import os
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor, nn

from kvcourse import rope
from kvcourse.config import ModelConfig
from kvcourse.device import as_dtype, resolve
from kvcourse.lm import LM
from kvcourse.model import Transformer
from kvcourse.model_folder import as_text, place, usable
from kvcourse.quality import transformer_of
from kvcourse.quant.grid import Grid, name_of
from kvcourse.quant.kernels import Dequantize
from kvcourse.quant.linear import QuantEmbedding, QuantLinear
from kvcourse.quant.report import LayerReport, Quantization
from kvcourse.quant.tensor import QuantizedTensor
from kvcourse.text_files import read_object, refuse_pointer
from kvcourse.weights.tensors import check_tensors, model_shapes

TENSORS, SETTINGS = "quantized.safetensors", "quantized.json"
FORMAT = 1


def save(model: LM | Transformer, folder: str | os.PathLike) -> Path:
    """Write a model that `quantize_model` made; return the folder, which `load` reads. A tokenizer is not written.

    Raises `ValueError` for a model that is compiled or has nothing quantized in it, and for a folder that cannot be
    used, `RuntimeError` when the files cannot be written; a model that was there before then stays.
    """
    model = transformer_of(model)
    layers = quantized_layers(model)
    model.layers  # noqa: B018 (a compiled model has none, and says so)
    if not layers:
        raise ValueError("Nothing in this model is quantized: give what quantize_model returned.")
    weights = {name: layer.quantized() for name, layer in layers.items()}
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, weight in weights.items():
        tensors |= {f"{name}.{part}": tensor for part, tensor in weight.tensors.items()}
    data = tensor_bytes({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    settings = {
        "format": FORMAT,
        "config": config_fields(model.config),
        "dtype": name_of(model.dtype),
        "weights": {name: weight_fields(weight, layers[name].asked) for name, weight in weights.items()},
        "report": None if getattr(model, "quantization", None) is None else asdict(model.quantization),
    }
    settings["sha256"] = checksum(settings, data)
    return place({SETTINGS: as_text(settings), TENSORS: data}, usable(folder))


def load(folder: str | os.PathLike, device=None) -> Transformer:
    """The model that `save` wrote, with its `quantization` report; its logits are equal bit for bit. `device` defaults
    to the one the course uses on this machine.

    A layer that was to go by a kernel which is missing here, or does not fit, dequantizes; its `.reason` says why.

    Raises `FileNotFoundError` when there is no such folder or it lacks a file, `ValueError` when one is damaged or was
    changed.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"folder must be the path of a folder, got {folder!r}.")
    folder = Path(folder)
    for file in (folder / SETTINGS, folder / TENSORS):
        if not file.is_file():
            raise FileNotFoundError(f"There is no file {file}: give a folder that kvcourse.quant.save has written.")
    device, _ = resolve(device)
    settings = read_object(folder / SETTINGS)
    if settings.get("format") != FORMAT:
        raise ValueError(f"{folder / SETTINGS} has format {settings.get('format')!r}; this version reads {FORMAT}.")
    tensors = read_whole(folder, settings)
    try:
        return build(settings, tensors, device, str(folder))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / SETTINGS} does not describe the model beside it ({type(error).__name__}: {error}): it was "
            "changed or is damaged; copy the folder again, or save the model again."
        ) from error


def quantized_layers(model: Transformer) -> dict[str, QuantLinear]:
    """{name: layer} of all that is quantized. An embedding keeps its rows in a `QuantLinear`, which a tied head is."""
    modules = model.named_modules()  # it gives a module that has two names once
    return {name.removesuffix(".table"): module for name, module in modules if isinstance(module, QuantLinear)}


def config_fields(config: ModelConfig) -> dict:
    scaling = config.rope_scaling
    kind = None if scaling is None else {"kind": type(scaling).__name__}
    return asdict(config) | {"rope_scaling": scaling and kind | asdict(scaling)}


def weight_fields(weight: QuantizedTensor, path: str) -> dict:
    grid = asdict(weight.grid) | {"scale_dtype": name_of(weight.grid.scale_dtype)}
    return {"shape": weight.shape, "grid": grid, "note": weight.note, "path": path, "tensors": list(weight.tensors)}


def checksum(settings: dict, data: bytes) -> str:
    """SHA-256 of both files: of all settings but the checksum, and of the tensors."""
    described = {name: value for name, value in settings.items() if name != "sha256"}
    digest = sha256(json.dumps(described).encode())
    digest.update(data)
    return digest.hexdigest()


def read_whole(folder: Path, settings: dict) -> dict[str, Tensor]:
    """The tensors of a folder, whose files must be those that were written."""
    file = folder / TENSORS
    refuse_pointer(file)
    data = file.read_bytes()
    if checksum(settings, data) != settings.get("sha256"):
        raise ValueError(
            f"{file} or the {SETTINGS} beside it is not as it was written, by the SHA-256 in the latter: copy the "
            "folder again, or save the model again."
        )
    try:
        return read_tensors(data)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: copy the folder again. ({error})") from error


def build(settings: dict, tensors: dict[str, Tensor], device: torch.device, where: str) -> Transformer:
    """The model, from the content of the two files."""
    config, dtype = read_config(settings["config"]), as_dtype(settings["dtype"])
    model, layers = Transformer(config, "meta", dtype), settings["weights"]
    plain = model_shapes(config, where)
    plain = {name: shape for name, shape in plain.items() if name.removesuffix(".weight") not in layers}
    parts = {f"{name}.{part}": name for name, fields in layers.items() for part in fields["tensors"]}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_tensors(found, plain | {part: found.get(part) for part in parts}, where, SETTINGS)
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    for name in plain:
        place_of, _, leaf = name.rpartition(".")
        if tensors[name].dtype != dtype:
            raise ValueError(f"{TENSORS} has {name} in {tensors[name].dtype}, but {SETTINGS} says {dtype}.")
        setattr(model.get_submodule(place_of), leaf, nn.Parameter(tensors[name], requires_grad=False))
    for name, fields in layers.items():
        shape = tuple(model.get_submodule(name).weight.shape)
        weight = read_weight(name, fields, shape, tensors)
        bias = getattr(model.get_submodule(name), "bias", None)
        layer = QuantLinear(weight, bias, dtype, Dequantize.path)
        layer.ask(fields["path"])  # what it was on the machine that saved it may not fit here
        put(model, name, layer)
    model.quantization = read_report(settings["report"])
    return model


def put(model: Transformer, name: str, layer: QuantLinear) -> None:
    """Put a quantized layer in its place: at the embedding it is looked up, and is the head too if they are tied."""
    if name != "embed_tokens":
        model.set_submodule(name, layer)
        return
    model.embed_tokens = QuantEmbedding(layer)
    if model.config.tie_embeddings:
        model.lm_head = layer


def read_weight(name: str, fields: dict, shape: tuple, tensors: dict[str, Tensor]) -> QuantizedTensor:
    if tuple(fields["shape"]) != shape:
        raise ValueError(f"{SETTINGS} says that {name} has shape {fields['shape']}, but its config asks for {shape}.")
    grid = Grid(**fields["grid"] | {"scale_dtype": as_dtype(fields["grid"]["scale_dtype"])})
    parts = {"zero": None} | {part: tensors[f"{name}.{part}"] for part in fields["tensors"]}
    return QuantizedTensor(grid=grid, shape=shape, note=fields["note"], **parts)


def read_config(fields: dict) -> ModelConfig:
    scaling = fields["rope_scaling"]
    if scaling is not None:
        kinds = {kind.__name__: kind for kind in rope.RopeScaling.__subclasses__()}
        scaling = kinds[scaling["kind"]](**{name: value for name, value in scaling.items() if name != "kind"})
    return ModelConfig(**fields | {"rope_scaling": scaling})


def read_report(fields: dict | None) -> Quantization | None:
    if fields is None:
        return None
    layers = [LayerReport(**layer | {"shape": tuple(layer["shape"])}) for layer in fields["layers"]]
    return Quantization(**fields | {"layers": layers})
