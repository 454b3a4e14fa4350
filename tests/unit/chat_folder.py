"""HF folders with a chat template of tests/unit/chat_templates and a small byte-level BPE tokenizer of its own.

The templates say what the published ones of their models say, in words of our own. A small vocabulary with merges is
as good as a large one here: encoding again what was decoded gives other tokens than were sampled, as in large ones.
"""
from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
STOPS = {"chatml": ["<|im_end|>", "<|endoftext|>"], "qwen3": ["<|im_end|>", "<|endoftext|>"],
         "glm45": ["<|endoftext|>", "<|user|>", "<|observation|>"],
         "llama31": ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], "forgetful": ["<|endoftext|>"]}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
           "<|observation|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]
WORDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
         "</arg_key>", "<arg_value>", "</arg_value>"]
"""Tokens that are not special: decoding never leaves them out."""
CORPUS = ["the answer is 42, and the next one is 43.\n\nI think that the number is higher",
          '{"name": "add", "arguments": ', "assistant user system tool the word is in the list of words"] * 20


def save(folder: Path, template: str) -> Path:
    """Write `folder`: tokenizer, template and generation_config.json; returns it."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet,
                                                              show_progress=False))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    stops = STOPS[template]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", eos_token=stops[0])
    wrapped.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    wrapped.save_pretrained(folder)
    ids = [wrapped.convert_tokens_to_ids(stop) for stop in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
