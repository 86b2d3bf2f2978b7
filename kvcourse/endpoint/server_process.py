"""The process in which llama.cpp's server runs: `python -m kvcourse.endpoint.server_process FILE SETTINGS`.

It writes its URL to FILE once the model is loaded, and ends when its standard input does: so it never outlives the
process that started it.
"""

import json
import os
import signal
import sys
from pathlib import Path


def main(said: Path, settings: dict) -> None:
    import xllamacpp

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = settings["path"], {Path(settings["path"]).stem}
    params.hostnames, params.port = ["127.0.0.1"], 0  # any free port
    params.n_parallel, params.n_ctx = settings["slots"], settings["slots"] * settings["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.n_gpu_layers, params.verbosity, params.warmup = 0, -1, True
    params.cache_prompt, params.cache_ram_mib = settings["prefix_caching"], 0  # a slot keeps its last text
    if settings["float32_cache"]:
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    part = said.with_suffix(".part")
    part.write_text(server.listening_address)
    os.replace(part, said)
    sys.stdin.buffer.read()
    os._exit(0)  # requests that still run are not waited for


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
