"""Hold the tiny models' two tokenizers against each other and against the pure algorithm.

Run by an environment's Python with a folder to write into. Silent where everything is right.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm_compat.adapters._offsets import WithOffsets
from vllm_compat.trial import byte_pairs, models

POOLS = (
    "abc de fg\n\t  12 345678",
    "def add(first, second): return first + second",
    "中国法国首都 😀👍🏽 é ü Ça Привет ½ ‿ __ ١٢٣ \u0301\u200d\u3000\xa0 ",
    "".join(chr(code) for code in range(0x20, 0x3000, 7)),
    "".join(chr(code) for code in range(0x1F300, 0x1FA00, 13)),
)
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "你好 who are you?"},
    {"role": "assistant", "content": "I am a model 😀", "reasoning_content": "Hm."},
    {"role": "user", "content": [{"type": "text", "text": "ok"}]},
]
RENDERED = (
    "<|im_system|>system<|im_middle|>Be kind.<|im_end|>"
    "<|im_user|>user<|im_middle|>你好 who are you?<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|><think>Hm.</think>I am a model 😀<|im_end|>"
    "<|im_user|>user<|im_middle|>ok<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|><think>"
)


def check_texts(slow: PreTrainedTokenizerBase, fast: PreTrainedTokenizerBase) -> None:
    """Encode and decode random text in several scripts, with special tokens and without."""
    ranks = models.ranks()
    draw = random.Random(0)
    for round_number in range(1500):
        text = "".join(draw.choices(draw.choice(POOLS), k=draw.randrange(40)))
        if round_number % 5 == 0:
            text += "<|im_end|>" + text + "<think>x</think>"
        else:
            assert slow(text)["input_ids"] == byte_pairs.encode(text, ranks), repr(text)
        ids = slow(text, add_special_tokens=False)["input_ids"]
        assert ids == fast(text, add_special_tokens=False)["input_ids"], repr(text)
        assert slow.decode(ids) == text
        assert fast.decode(ids) == text
        check_offsets(slow, fast, text, draw.randrange(1, 30))


def check_offsets(
    slow: PreTrainedTokenizerBase, fast: PreTrainedTokenizerBase, text: str, length: int
) -> None:
    """Hold the offsets that are computed for the slow tokenizer against the fast one's own."""
    for cut in ({}, {"truncation": True, "max_length": length}):
        wanted = {"return_offsets_mapping": True, "add_special_tokens": False, **cut}
        given, own = WithOffsets(slow)(text, **wanted), fast(text, **wanted)
        assert given["input_ids"] == own["input_ids"], repr(text)
        assert given["offset_mapping"] == own["offset_mapping"], repr(text)


def main(folder: Path) -> None:
    """Write both tokenizers and check them."""
    for name, write in (
        ("slow", models.write_slow_tokenizer),
        ("fast", models.write_fast_tokenizer),
    ):
        (folder / name).mkdir()
        write(folder / name)
    slow = AutoTokenizer.from_pretrained(folder / "slow", trust_remote_code=True)
    fast = AutoTokenizer.from_pretrained(folder / "fast")
    assert type(slow).__name__ == "TikTokenTokenizer"
    assert not slow.is_fast
    assert fast.is_fast
    assert len(slow) == len(fast) == models.VOCABULARY

    check_texts(slow, fast)
    for name in models.SPECIAL_TOKENS.values():
        right = models.special_token_id(name)
        assert slow.convert_tokens_to_ids(name) == fast.convert_tokens_to_ids(name) == right
        assert slow.encode(name) == [right]
    for tokenizer in (slow, fast):
        rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        assert rendered == RENDERED

    # What a slow tokenizer cannot give: refused by transformers 4, left out by transformers 5.
    try:
        encoding = slow("text", return_offsets_mapping=True)
    except NotImplementedError:
        pass
    else:
        assert "offset_mapping" not in encoding

    # Worker processes get copies.
    for other in (copy.deepcopy(slow), pickle.loads(pickle.dumps(slow))):
        assert other("hello 你 <think>")["input_ids"] == slow("hello 你 <think>")["input_ids"]
    slow.save_pretrained(folder / "saved")
    saved = AutoTokenizer.from_pretrained(folder / "saved", trust_remote_code=True)
    assert saved.get_vocab() == slow.get_vocab()
    assert (
        slow("one two three", truncation=True, max_length=3)["input_ids"]
        == slow.encode("one two three")[:3]
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
