#!/usr/bin/env python3
"""Writes gemma3.json: what llama.cpp answers greedily to a few prompts, with Gemma-3-270m.

    python3 gemma3_reference.py gemma-3-270m-q4_k_m.gguf > gemma3.json

Needs llama-cpp-python (0.3.36 made the file that is here). The cache is float32. A margin is by how
much the chosen token's logit exceeds the next one's: llama.cpp rounds activations to 8 bits, so choices
with a small margin say little about another engine. The long prompt is past the model's window of 512.
"""
import ctypes
import json
import sys

import llama_cpp as L
import numpy as np

TOKENS = 20
FACTS = [
    "The river rises in the hills north of the town and turns east at the old mill.",
    "In spring the meadows beside it are under water for a week or two.",
    "Farmers move their cattle to the upper fields before the snow has melted.",
    "A stone bridge of five arches carries the road to the market.",
    "The third arch was rebuilt in 1893 after a flood had torn it away.",
    "Children fish for trout from its parapet on summer evenings.",
    "Below the bridge stand the dye works, which gave the lower town its name.",
    "Their chimney is forty metres tall and can be seen from the sea.",
    "The last dyer closed his doors in 1961 and the building became a library.",
    "It holds nine thousand books, most of them about rivers.",
]
PROMPTS = {
    "capital": "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "counting": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,",
    "alphabet": "Monday, Tuesday, Wednesday, Thursday,",
    "code": "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return a - b\n\ndef multiply(a, b):\n",
    "spaces-unicode": "Grüße aus Köln! 🙂\n\n\n    日本の首都は東京です。フランスの首都は",
    "long": "\n".join(f"{i + 1}. {FACTS[i % 10]}" for i in range(40)) + "\n41.",
}


def main(path):
    L.llama_backend_init()
    model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
    vocab = L.llama_model_get_vocab(model)
    size = L.llama_vocab_n_tokens(vocab)
    items = []
    for name, prompt in PROMPTS.items():
        params = L.llama_context_default_params()
        params.n_ctx = params.n_batch = 2048
        params.n_ubatch = 256
        params.n_threads = params.n_threads_batch = 2
        params.type_k = params.type_v = 0  # float32
        context = L.llama_init_from_model(model, params)
        raw = prompt.encode()
        ids = (L.llama_token * 2048)()
        n = L.llama_tokenize(vocab, raw, len(raw), ids, 2048, True, False)
        prompt_ids, generated, margins = list(ids[:n]), [], []
        feed, position = prompt_ids, 0
        batch = L.llama_batch_init(2048, 0, 1)
        while len(generated) < TOKENS:
            batch.n_tokens = len(feed)
            for i, token in enumerate(feed):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, i + 1 == len(feed)
            assert L.llama_decode(context, batch) == 0
            position += len(feed)
            logits = np.ctypeslib.as_array(L.llama_get_logits_ith(context, -1), shape=(size,))
            second, first = np.sort(logits)[-2:]
            generated.append(int(logits.argmax()))
            margins.append(round(float(first - second), 3))
            feed = generated[-1:]
        L.llama_free(context)
        items.append({"id": name, "prompt": prompt, "prompt_ids": prompt_ids,
                      "generated_ids": generated, "margins": margins})
        text = (ctypes.c_char * 4096)()
        n = L.llama_detokenize(vocab, (L.llama_token * TOKENS)(*generated), TOKENS, text, 4096, False, False)
        print(f"{name}: {len(prompt_ids)} tokens, least margin {min(margins)}: "
              f"{text.raw[:n].decode('utf8', 'replace')!r}", file=sys.stderr)
    made = {"llama_cpp_python": L.__version__, "model": "gemma-3-270m-q4_k_m.gguf"}
    print("{\n \"made_with\": " + json.dumps(made) + ",\n \"items\": [")
    print(",\n".join("  " + json.dumps(item, ensure_ascii=False) for item in items))
    print(" ]\n}")


main(sys.argv[1])
