"""Use legato with the Trainer of Hugging Face transformers: a callback of the trainer.

torchrun --nproc-per-node 2 examples/with_transformers.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from legato.integrations.transformers import Legato


def main():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32))
    tokens = torch.randint(0, 100, (128, 16))
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=4,
            max_steps=16,
            learning_rate=1e-3,
            gradient_accumulation_steps=2,
            logging_steps=8,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
        trainer.add_callback(Legato(trainer))
        result = trainer.train()
        trainer.save_model(directory)
    if arguments.process_index == 0:
        total = sum(p.double().sum().item() for p in model.parameters())
        print(f"{result.global_step} steps on {arguments.world_size} ranks, weights add up to {total:.12f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
