"""Decodes with the authors' code, in the Python of --python; imports nothing of ours.

  python theirs.py CHECKOUT MODEL DTYPE

CHECKOUT is their repository, MODEL a Hugging Face directory. Prints {"device"} when the model is loaded; then reads one
JSON object per line, {"threads", "prompts", "settings"}, and answers {"answers", "seconds"}: the tokens decoded after
each prompt, one prompt after the other, and the time of all of them.
"""

import json
import os
import sys
import time
import types


def main(checkout: str, model_path: str, dtype: str) -> None:
    """Serves until nobody asks any more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no reply
    sys.path.insert(0, checkout)
    import torch
    from generate import generate_refusion
    from qwen3.modeling_qwen3_refusion import Qwen3ForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3ForCausalLM.from_pretrained(model_path, torch_dtype=getattr(torch, dtype)).to(device).eval()
    print(json.dumps({"device": device}), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        torch.set_num_threads(asked["threads"])
        settings = asked["settings"]
        tokenizer = types.SimpleNamespace(eos_token_id=settings.pop("eos_id"))  # all that they ask of one
        answers, began = [], time.perf_counter()
        for prompt in asked["prompts"]:
            given = torch.tensor([prompt], device=device)
            text, _ = generate_refusion(model, tokenizer, given, temperature=0.0, **settings)
            answers.append(text[0, len(prompt) :].tolist())
        print(json.dumps({"answers": answers, "seconds": time.perf_counter() - began}), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
