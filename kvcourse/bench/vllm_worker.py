"""vLLM, in whatever Python has it: `PYTHON vllm_worker.py FOLDER DTYPE MAX_LEN`. Nothing of kvcourse is needed there.

It loads the Hugging Face checkpoint in FOLDER and then answers requests as `worker.py` does: a line of JSON each, and
an answer with the key "error" is the last.
"""

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import perf_counter


def main(folder: str, dtype: str, max_len: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM's log must not stand among the answers

    def answer(**content) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        import vllm

        options = {"dtype": dtype, "max_model_len": int(max_len), "enforce_eager": True, "skip_tokenizer_init": True}
        llm = vllm.LLM(model=folder, **options)
        answer(program=f"vllm {vllm.__version__}", peak_without_loading=memory().forget_peak(llm_device()))
        for line in sys.stdin:
            request = json.loads(line)
            answer(**(write_one if "prompt" in request else serve)(vllm, llm, **request))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        said = str(error).strip().split("\n")[0]
        answer(error=f"{type(error).__name__}: {said}".rstrip(": "))


def serve(vllm, llm, prompts: list[list[int]], new_tokens: int) -> dict:
    """Exactly `new_tokens` most probable tokens for each prompt; seconds from the submission to the last token."""
    llm.reset_prefix_cache()  # prompts are the same in each round
    sampling = greedy(vllm, new_tokens)
    before = perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    seconds = perf_counter() - before
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "seconds": seconds}


def write_one(vllm, llm, prompt: list[int], new_tokens: int) -> dict:
    """The same for one prompt, with the moment at which each token arrived, and the most memory held so far."""
    llm.reset_prefix_cache()
    engine, sampling = llm.llm_engine, greedy(vllm, new_tokens)
    tokens, arrivals = [], []
    before = perf_counter()
    engine.add_request(f"at {before}", {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            new = list(output.outputs[0].token_ids[len(tokens) :])
            tokens += new
            arrivals += [perf_counter() - before] * len(new)
    return {"tokens": tokens, "arrivals": arrivals, "peak_bytes": memory().peak_memory(llm_device())}


def greedy(vllm, new_tokens: int):
    return vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)


def llm_device():
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def memory():
    """The file beside this one, without its package, which is not installed here."""
    spec = spec_from_file_location("memory", Path(__file__).with_name("memory.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":  # vLLM starts processes that import this file
    main(*sys.argv[1:])
