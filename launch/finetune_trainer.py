"""Fine-tunes a causal language model of Hugging Face's with its Trainer, and evaluates it, without logits.

    python launch/finetune_trainer.py --model PATH --data TEXTS --steps 100
    torchrun --nproc-per-node 2 launch/finetune_trainer.py --model PATH --deepspeed launch/ds_zero3.json

Without --model it is a small Llama from scratch, without --data the Python standard library's sources are the text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from data import BORDER_ID, cache_folder, prepare, text_files

from cce_dist import TokenStats
from cce_dist.integrations.transformers import patch


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="a folder or a name that from_pretrained takes, with its tokenizer")
    add("--data", type=Path, nargs="*", help="text files, or folders of them")
    add("--output", type=Path, default=Path("runs/finetune"), help="where the model and its checkpoints go")
    add("--deepspeed", type=Path, help="a DeepSpeed config, as launch/ds_*.json")
    add("--steps", type=int, default=40)
    add("--batch", type=int, default=8, help="sequences of a rank and step")
    add("--length", type=int, default=128, help="tokens of a sequence")
    add("--rate", type=float, default=1e-3, help="the learning rate")
    return parser.parse_args(argv)


def load_rows(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Sequences of the text's tokens; the model shifts the labels."""
    files = text_files(args.data)
    if args.model:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        tokens = torch.tensor([i for file in files for i in tokenizer(file.read_text(errors="replace")).input_ids])
    else:
        folder = cache_folder(files, 4096, args.output / "cache")
        if not (folder / "tokens.pt").exists():
            prepare(files, 4096, folder)
        tokens = torch.load(folder / "tokens.pt", weights_only=True).long()
    return [{"input_ids": ids, "labels": ids} for ids in tokens.split(args.length)[:-1]]


def load_model(args: argparse.Namespace) -> Any:
    if args.model:
        return transformers.AutoModelForCausalLM.from_pretrained(args.model)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=args.length, bos_token_id=BORDER_ID, eos_token_id=BORDER_ID,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def deepspeed_config(path: Path | None) -> dict[str, Any] | None:
    """The file's, with the Trainer's batch sizes and a whole model in what it saves."""
    if path is None:
        return None
    config = json.loads(path.read_text())
    zero = {"stage3_gather_16bit_weights_on_model_save": True, **config.get("zero_optimization", {})}
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    return {**config, **sizes, "zero_optimization": zero}


def metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
    stats, labels = TokenStats(*prediction.predictions), prediction.label_ids[:, 1:]
    return {
        "accuracy": float((stats.argmax[:, :-1] == labels).mean()),
        "entropy": float(stats.entropy[:, :-1].mean()),
    }


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = parse_args(argv)
    gpu = torch.cuda.is_available()
    # before the model: under ZeRO-3 from_pretrained then loads each rank's part alone
    arguments = transformers.TrainingArguments(
        str(args.output), max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=args.rate,
        per_device_eval_batch_size=args.batch, bf16=gpu, use_cpu=not gpu, max_grad_norm=0.0, report_to=[],
        logging_steps=10, save_strategy="no", deepspeed=deepspeed_config(args.deepspeed),
    )  # fmt: skip
    rows, model = load_rows(args), load_model(args)
    print(patch(model, skip_logits=True, return_stats=True))
    held_out = max(args.batch, len(rows) // 50)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows[held_out:], eval_dataset=rows[:held_out], compute_metrics=metrics
    )
    trainer.train()
    trainer.save_model(args.output / "model")
    return trainer.evaluate()


if __name__ == "__main__":
    print(main())
