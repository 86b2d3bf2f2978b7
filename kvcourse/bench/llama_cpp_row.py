"""llama.cpp as a row of the table: the file that the model comes from, or one written for it, as it runs it by itself.

Nothing is set but the number of threads, which is PyTorch's here, and that earlier prompts are not remembered. So keys
and values are in float16. Tokens and the moments they arrive come from its stream.
"""

from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kvcourse.bench.contestants import ROOM, Contestant
from kvcourse.bench.llama_cpp import base_settings, check_installed, main_type, require_tokenizer, start_server
from kvcourse.config import ModelConfig
from kvcourse.cost import bytes_moved
from kvcourse.lm import find_model, load_model
from kvcourse.metrics import Generation, Stopwatch
from kvcourse.weights.gguf_file import GGUFModel, open_gguf
from kvcourse.weights.gguf_write import write_gguf

CACHE_BITS = 16


class LlamaCpp(Contestant):
    title = "llama.cpp"
    exact = False
    device, weights = torch.device("cpu"), ""
    compilations, compile_seconds, reason = 0, 0.0, None  # it was compiled before

    def __init__(self, name: str):
        check_installed()
        self.program = f"xllamacpp {version('xllamacpp')}"
        self.folder = TemporaryDirectory()
        path = gguf_of(name, Path(self.folder.name))
        metadata, self.tensors = open_gguf(path)
        require_tokenizer(path, metadata)
        self.config: ModelConfig = GGUFModel(path).config
        self.weights = main_type(self.tensors)
        self.means = f"llama.cpp on the CPU, over {self.weights} weights, with as many threads as PyTorch"
        self.server = start_server(base_settings(path, min(ROOM, self.config.max_seq_len)))

    def generate(self, prompt: list[int], new_tokens: int) -> Generation:
        request = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        request |= {"cache_prompt": False, "logprobs": 1, "post_sampling_probs": True}  # the one place that has ids
        made, errors = Generation(len(prompt)), []
        watch = Stopwatch(self.device)

        def take(event: dict) -> bool:
            now = watch.read()
            if "error" in event:
                errors.append(event["error"])
            for token in ((event.get("choices") or [{}])[0].get("logprobs") or {}).get("content", []):
                made.ids.append(token["id"])
                made.arrivals.append(now)
            return False  # go on

        self.server.handle_completions(request, take)
        if errors:
            raise RuntimeError(f"llama.cpp does not continue this text: {errors[0].get('message', errors[0])}")
        if len(made.ids) != new_tokens:
            raise RuntimeError(
                f"llama.cpp streamed {len(made.ids)} tokens where {new_tokens} were asked for: it holds back a token "
                "that ends in the middle of a letter."
            )
        return made

    def step_bytes(self, context: int) -> int:
        moved = bytes_moved(self.config, 1, context, bits=CACHE_BITS)
        sizes = {name: int(tensor.n_bytes) for name, tensor in self.tensors.items()}
        if "output.weight" in sizes:  # else the embedding is the head, and read whole
            sizes["token_embd.weight"] //= self.config.vocab_size
        return sum(sizes.values()) + moved.cache_read + moved.cache_written

    def lead(self, text: list[int]) -> None:
        """It is not asked: what it computes is held against the course's rows."""

    def perplexity(self) -> None:
        """A peer's is not measured."""


def gguf_of(name: str, folder: Path) -> Path:
    """The `.gguf` file that a model is, or one that is written into `folder` for it."""
    path = find_model(name)
    if path.suffix == ".gguf":
        return path
    return write_gguf(load_model(name, device="cpu"), folder / "model.gguf", source=path)
